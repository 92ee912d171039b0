"""Samples from the gradient of a first linear layer. Shapes: H neurons, F features, G groups of neurons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work

ALIKE = 1e-3
"""Share of the features' range by which two neurons' samples may differ and be of one sample."""
FAINT = 1e-6
"""Share of the largest bias gradient below which a neuron is left out: it saw next to nothing."""
OUTSIDE = 0.05
"""Share of the features' range by which a sample may exceed it: others are mixtures."""


def linear_leak() -> Probe:
    """Divide weight gradients of the first linear layer by bias gradients (Phong et al. 2018, section 3, example 3).

    For a neuron that one sample of all has activated, grad W_j / grad b_j is that sample, exactly (IEEE Trans. Inf.
    Forensics Secur. 13(5)); it holds for sums over clients and steps too. Neurons that agree on a sample saw it alone:
    samples are ranked by how many do, which needs no look at the truth. Where noise leaves no neuron's sample within
    the features' range, one sample is guessed by least squares over all neurons, which averages noise away.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        guesses, row = list[Guess](), 0
        for sight in sights:
            for delta_D, num in zip(sight.rows.delta_D, sight.num_samples_R, strict=True):
                guesses.append(_guess(known, delta_D, num, row))
                row += 1
                if work.is_over():
                    return guesses
        return guesses

    return Probe(goal=SAMPLES, run=run, why_not=_why_not)


def first_linear(model: nn.Module) -> str | None:
    """Return the name of the first layer that computes, if it is linear with a bias and trained; else None."""
    still = (nn.Flatten, nn.Identity, nn.Dropout, nn.Sequential)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            trained = module.bias is not None and module.bias.requires_grad and module.weight.requires_grad
            return str(name) if trained else None
        if module is not model and not isinstance(module, still) and not list(module.children()):
            return None
    return None


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if known.tokens:
        return "inputs are tokens, not numbers"
    if first_linear(known.model) is None:
        return "the model does not begin with a trained linear layer that has a bias"
    return None


def _guess(known: Known, delta_D: Tensor, num_samples: int, row: int) -> Guess:
    name = first_linear(known.model)
    views = known.spec.without_buffers.views(delta_D.double())
    weight_HF, bias_H = views[f"{name}.weight"], views[f"{name}.bias"]
    loud = bias_H.abs() > FAINT * bias_H.abs().max()
    weight_HF, bias_H = weight_HF[loud], bias_H[loud]
    samples_HF = weight_HF / bias_H.unsqueeze(1)
    span = known.high - known.low
    inside = ((samples_HF >= known.low - OUTSIDE * span) & (samples_HF <= known.high + OUTSIDE * span)).all(1)
    weight_HF, bias_H, samples_HF = weight_HF[inside], bias_H[inside], samples_HF[inside]
    found, sure = list[Tensor](), list[float]()
    left = torch.argsort(bias_H.abs(), descending=True)
    while len(left):
        near = (samples_HF[left] - samples_HF[left[0]]).abs().amax(1) <= ALIKE * span
        group = left[near]
        share = bias_H[group]
        found.append((share.unsqueeze(1) * weight_HF[group]).sum(0) / share.square().sum())  # least squares
        sure.append(len(group) + float(share.abs().max() / (1 + bias_H.abs().max())))
        left = left[~near]
    if not found:
        return _blurred(known, views[f"{name}.weight"], views[f"{name}.bias"], row)
    order = sorted(range(len(found)), key=lambda place: -sure[place])[: num_samples or None]
    x = torch.stack([found[place] for place in order]).view(-1, *known.input_shape)
    return Guess(row=row, x=x.to(known.spec.dtype), sure_N=torch.tensor([sure[place] for place in order]))


def _blurred(known: Known, weight_HF: Tensor, bias_H: Tensor, row: int) -> Guess:
    """Return the sample that explains all neurons best; of several, it is a mixture."""
    power = bias_H.square().sum()
    if not power > 0:
        return Guess(row=row)
    x = ((bias_H @ weight_HF) / power).clamp(known.low, known.high).view(1, *known.input_shape)
    return Guess(row=row, x=x.to(known.spec.dtype), sure_N=torch.zeros(1))
