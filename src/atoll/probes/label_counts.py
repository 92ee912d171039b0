"""Labels from the gradient of the last layer. Shapes: K classes, H features of the last layer, N samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from atoll.core.probe import LABELS, Guess, Known, Probe, Sight, Work
from atoll.probes.rows import Row, rows_of

MOST = 500
"""Own samples that are looked at."""
FIRM = 1e3
"""How firmly counts must add up to the number of samples, beside one entry of the gradient."""


class Own(NamedTuple):
    """What an attacker's own samples show of a model."""

    slopes_KK: Tensor
    """[j, k]: the mean slope at output k of samples of class j."""
    direction_H: Tensor
    """Along which weights' gradients are taken where there is no bias."""


def label_counts() -> Probe:
    """Read one label off a sign, and how many of each from means of other samples' gradients.

    The slope of cross entropy at output k is p_k - [k = y]: of one sample, only that of its label is negative (Zhao et
    al. 2020, arXiv:2001.02610). Of several, the mean is sum_j n_j (p_j - e_j) / N, where p_j are the mean
    probabilities of samples of class j, which own samples show (Geng et al. 2021, arXiv:2110.09074, has one mean
    for all classes): the n_j solve this by least squares without negative counts. After several steps slopes are
    the mean of those at the first and at the last model of the client. Where clients do not say how many
    samples they have, counts are shares that add up to 1.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        guesses, own = list[Guess](), dict[int, Own]()
        for row in rows_of(known, sights):
            if id(row.model_M) not in own:
                own[id(row.model_M)] = own_slopes(known, row.model_M)
            guesses.append(Guess(row=row.place, counts_K=row_counts(known, row, own[id(row.model_M)])))
            if work.is_over():
                break
        return guesses

    return Probe(goal=LABELS, run=run, why_not=no_counts)


def no_counts(known: Known, sights: Sequence[Sight]) -> str | None:
    """Say why labels cannot be read off the last layer; None if they can."""
    if known.tokens or known.elsewhere.y.dim() != 1 or known.elsewhere.y.is_floating_point():
        return "targets are not one class a sample"
    if last_linear(known) is None:
        return "the model does not end with a trained linear layer of one output a class"
    return None


def last_linear(known: Known) -> str | None:
    """Return the name of the last layer that computes, if it is linear with an output a class and is trained."""
    layers = [(name, layer) for name, layer in known.model.named_modules() if list(layer.parameters(recurse=False))]
    name, layer = layers[-1]
    shared = {slot.name for slot in known.spec.trainable}
    fits = isinstance(layer, nn.Linear) and layer.out_features == known.num_classes and f"{name}.weight" in shared
    return name if fits else None


def row_counts(known: Known, row: Row, own: Own | None = None) -> Tensor:
    """Return how many samples of each class are behind a row, (K,); shares if it does not say how many samples."""
    weight_KH, bias_K = _last_gradients(known, row)
    if row.num_samples == 1:
        return nn.functional.one_hot(_sign_rule(weight_KH, bias_K), known.num_classes).to(known.spec.dtype)
    slopes_KK, direction_H = own or own_slopes(known, row.model_M)
    seen_K = weight_KH @ direction_H if bias_K is None else bias_K
    if row.num_steps > 1 or not row.num_samples:
        num = len(row.delta_D)
        ends_M = torch.cat([row.model_M[:num] + row.delta_D, row.model_M[num:]])
        slopes_KK = (slopes_KK + own_slopes(known, ends_M, direction_H).slopes_KK) / 2
    if not row.num_samples:
        raw_K, _ = nnls(slopes_KK.T.numpy(), seen_K.numpy())
        return torch.from_numpy(raw_K / max(raw_K.sum(), np.finfo(float).tiny)).to(known.spec.dtype)
    firm = FIRM * float(slopes_KK.abs().max())
    left = np.vstack([slopes_KK.T.numpy(), np.full((1, known.num_classes), firm)])
    raw_K, _ = nnls(left, np.append(seen_K.numpy() * row.num_samples, firm * row.num_samples))
    return torch.from_numpy(_rounded(raw_K, row.num_samples)).to(known.spec.dtype)


def labels_of(known: Known, row: Row) -> Tensor:
    """Return the labels of a row's samples by their counts, in order, (N,)."""
    return torch.arange(known.num_classes).repeat_interleave(row_counts(known, row).long())


def _last_gradients(known: Known, row: Row) -> tuple[Tensor, Tensor | None]:
    views = known.spec.without_buffers.views(row.mean_gradient().double())
    name = last_linear(known)
    return views[f"{name}.weight"], views.get(f"{name}.bias")


def _sign_rule(weight_KH: Tensor, bias_K: Tensor | None) -> Tensor:
    """Return the one class whose slope has another sign than all others'."""
    if bias_K is not None:
        return bias_K.argmin()
    alike_KK = weight_KH @ weight_KH.T  # rows of other classes point the same way
    return (alike_KK.sum(1) - alike_KK.diagonal()).argmin()


def own_slopes(known: Known, model_M: Tensor, direction_H: Tensor | None = None) -> Own:
    """Return the mean slopes of the attacker's own samples by class.

    They are of the bias, or, without one, of the weights along the mean feature, or along `direction_H`.
    """
    features, y = list[Tensor](), known.elsewhere.y[:MOST]
    name = last_linear(known)
    layer = known.model.get_submodule(str(name))
    hook = layer.register_forward_hook(lambda layer, inputs, outputs: features.append(inputs[0].detach().double()))
    try:
        outputs = known.outputs(model_M.clone(), known.elsewhere.x[:MOST]).detach().requires_grad_()
    finally:
        hook.remove()
    slopes_NK = torch.autograd.grad(known.loss(outputs, y).sum(), outputs)[0].double()
    mean_H = features[0].mean(0)
    direction_H = mean_H / mean_H.square().sum() if direction_H is None else direction_H
    share_N = torch.ones(len(y), dtype=torch.float64) if layer.bias is not None else features[0] @ direction_H
    mean_K = (outputs.detach().double().softmax(1) * share_N.unsqueeze(1)).mean(0)
    slopes_KK = mean_K - torch.eye(known.num_classes, dtype=torch.float64)  # for classes that own samples lack
    for label in sorted(set(y.tolist())):
        slopes_KK[label] = (slopes_NK * share_N.unsqueeze(1))[y == label].mean(0)
    return Own(slopes_KK, direction_H)


def _rounded(raw_K: np.ndarray, total: int) -> np.ndarray:
    """Round to whole counts that add up to the total, by largest remainders.

    >>> _rounded(np.array([0.4, 1.7, 0.9]), 3)
    array([0., 2., 1.])
    """
    raw_K = raw_K * total / max(raw_K.sum(), np.finfo(float).tiny)
    counts_K: np.ndarray = np.floor(raw_K)
    counts_K[np.argsort(counts_K - raw_K, kind="stable")[: total - int(counts_K.sum())]] += 1
    return counts_K
