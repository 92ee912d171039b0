"""Images from gradients of convolutions, layer by layer in closed form. Shapes: I values of a layer's input, O outputs.

E constraints: one for each output that is known, and one for each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work
from atoll.probes.label_counts import last_linear, no_counts
from atoll.probes.matching import gradient_of, squared_distance
from atoll.probes.rows import Row, rows_of

MOST = 4096
"""Values of a convolution's input at most: its constraints are a dense matrix of so many columns."""
CHUNK = 256
"""Columns of that matrix that are made at once."""
FULL = 1e-9
"""Least share of an activation's range between a value and the end of the range: beyond, the input is unknown."""
FAINT = 1e-4
"""Share of the largest output of a ReLU below which one is taken for 0."""
STILL = (nn.Flatten, nn.Identity)
ACTIVATIONS = (nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ReLU)


class Back(NamedTuple):
    """What is known at one place of the model, on the way back to the image."""

    x: Tensor
    """The values there, (1, ...)."""
    slope: Tensor
    """The gradient of the loss with respect to them."""
    known: Tensor
    """How firmly each value is known: 0 if it is not."""
    rank: float = 1.0
    """Rank of the constraints as a share of the unknowns, the least of all layers; below 1 values are a guess."""


def r_gap() -> Probe:
    """Solve for the input of each layer from the last to the first (Zhu & Blaschko 2021, arXiv:2010.07733, alg. 1).

    With k the slope at the outputs of a layer and x its input, z = W x + b is known from the layer behind it, and
    grad W = k x^T is seen: x is the least-squares solution of both, [W; K] x = [z - b; grad W] (eq. 6 to 15), where
    convolutions are matrices W and K too. The slope one layer down is W^T k times the activation's. At the end, k is
    the bias gradient. Outputs count as far as the activation lets them be told, so that a ReLU's zeros do not count.
    It needs no search, but errors grow from layer to layer, and it takes one sample at a time. The rank of these
    equations says whether any attack can find the image from its gradient alone (section 4).
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        guesses = list[Guess]()
        for row in rows_of(known, sights):
            if row.num_samples == 1 and row.num_steps == 1:
                guesses.append(_guess(known, row))
            if work.is_over():
                break
        return guesses

    return Probe(goal=SAMPLES, run=run, why_not=_why_not)


def chain_of(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a plain sequence with their names; None if the model is another or has others in it."""
    layers = list[tuple[str, nn.Module]]()
    if not isinstance(model, nn.Sequential):
        return None
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
            if not plain:
                return None
        elif isinstance(layer, nn.Sequential):
            continue
        elif not isinstance(layer, (nn.Linear, *STILL, *ACTIVATIONS)):
            return None
        layers.append((str(name), layer))
    return layers


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    layers = chain_of(known.model)
    if layers is None:
        return "the model is no plain sequence of convolutions and linear layers, such as one with pooling"
    if not any(isinstance(layer, nn.Conv2d) for _, layer in layers):
        return "the model has no convolution: `linear_leak` does the same for less"
    name = last_linear(known)
    if no_counts(known, sights) or not isinstance(layers[-1][1], nn.Linear) or f"{name}.bias" not in _shared(known):
        return "the model does not end with a trained linear layer that has a bias for each class"
    if any(f"{name}.weight" not in _shared(known) for name, layer in layers if list(layer.parameters())):
        return "clients do not train and send all layers"
    size = max(x.numel() for x, (_, layer) in zip(_inputs(known), layers, strict=True) if isinstance(layer, nn.Conv2d))
    if size > MOST:
        return f"a convolution has {size:,} inputs, and its equations are solved for at most {MOST:,}"
    pairs = [
        (num, steps) for sight in sights for num, steps in zip(sight.num_samples_R, known.steps(sight), strict=True)
    ]
    if (1, 1) not in pairs:
        return "no client took one step on one sample, which is what it takes"
    return None


def _shared(known: Known) -> set[str]:
    return {slot.name for slot in known.spec.trainable}


def _inputs(known: Known) -> list[Tensor]:
    """Return inputs of the right shapes for all layers."""
    x, found = torch.zeros(1, *known.input_shape, dtype=known.spec.dtype), list[Tensor]()
    with torch.no_grad():
        for _, layer in chain_of(known.model) or []:
            found.append(x)
            x = layer(x)
    return found


def _guess(known: Known, row: Row) -> Guess:
    views = known.spec.without_buffers.views(row.model_M[: len(row.delta_D)].double())
    slopes = known.spec.without_buffers.views(row.mean_gradient().double())
    layers, inputs = chain_of(known.model), _inputs(known)
    assert layers is not None
    slope = slopes[f"{layers[-1][0]}.bias"].unsqueeze(0)
    if not slope.any():
        return Guess(row=row.place)
    y, back = slope.argmin().view(1), Back(x=slope, slope=slope, known=torch.zeros_like(slope))
    for (name, layer), like in zip(reversed(layers), reversed(inputs), strict=True):
        if isinstance(layer, STILL):
            x, slope, firm = (each.view(like.shape) for each in back[:3])
            back = back._replace(x=x, slope=slope, known=firm)
        elif isinstance(layer, nn.Linear):
            x = back.slope @ slopes[f"{name}.weight"] / back.slope.square().sum().clamp(min=1e-300)
            back = back._replace(x=x, slope=back.slope @ views[f"{name}.weight"], known=torch.ones_like(x))
        elif isinstance(layer, nn.Conv2d):
            weight, bias = views[f"{name}.weight"], views.get(f"{name}.bias")
            back = _before_convolution(layer, weight, bias, slopes[f"{name}.weight"], back, like)
        else:
            back = _before_activation(layer, back)
    x = back.x.clamp(known.low, known.high)
    apart = float(
        squared_distance(gradient_of(known, row, x, y, simulate=False), row.mean_gradient().double()).detach()
    )
    notes = {"distance": apart, "rank": back.rank}
    return Guess(row=row.place, x=x.to(known.spec.dtype), y=y, sure_N=torch.tensor([-apart]), notes=notes)


def _before_activation(layer: nn.Module, back: Back) -> Back:
    """Return what is known before an activation; values at the end of its range could be of many inputs."""
    if isinstance(layer, nn.Sigmoid):
        x = back.x.clamp(FULL, 1 - FULL)
        z, rate = torch.logit(x), x * (1 - x)
    elif isinstance(layer, nn.Tanh):
        x = back.x.clamp(2 * FULL - 1, 1 - 2 * FULL)
        z, rate = torch.atanh(x), 1 - x.square()
    else:
        leak = float(layer.negative_slope) if isinstance(layer, nn.LeakyReLU) else 0.0
        rate = torch.where(back.x > (0 if leak else FAINT * back.x.max()), 1.0, leak).double()
        z = torch.where(rate > 0, back.x / rate, 0.0)
    return back._replace(x=z, slope=back.slope * rate, known=back.known * rate)


def _before_convolution(
    layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, slope_W: Tensor, back: Back, like: Tensor
) -> Back:
    """Return the input of a convolution, by least squares over its outputs and its weights' gradient."""
    output_OI, weight_EI = _matrices(layer, weight, back.slope, like)
    known_O = back.known.flatten()
    z_O = (back.x if bias is None else back.x - bias.view(1, -1, 1, 1)).flatten()
    balance = float((known_O.unsqueeze(1) * output_OI).norm() / weight_EI.norm().clamp(min=1e-300))
    left_EI = torch.cat([known_O.unsqueeze(1) * output_OI, balance * weight_EI])
    right_E = torch.cat([known_O * z_O, balance * slope_W.flatten()])
    solved = torch.linalg.lstsq(left_EI, right_E.unsqueeze(1), driver="gelsy")
    x, slope = solved.solution.view(like.shape), (output_OI.T @ back.slope.flatten()).view(like.shape)
    return Back(x, slope, torch.ones_like(x), min(back.rank, float(solved.rank) / like.numel()))


def _matrices(layer: nn.Conv2d, weight: Tensor, slope: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices of a convolution: input -> outputs (O, I), and input -> gradient of the weights (E, I)."""
    size, outputs, gradients = like.numel(), list[Tensor](), list[Tensor]()
    geometry: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    slope_OL = slope.flatten(2)[0]
    for start in range(0, size, CHUNK):
        one_hot = torch.zeros(min(CHUNK, size - start), size, dtype=torch.float64)
        one_hot[torch.arange(len(one_hot)), start + torch.arange(len(one_hot))] = 1
        images = one_hot.view(-1, *like.shape[1:])
        outputs.append(functional.conv2d(images, weight, **geometry).flatten(1))
        patches = functional.unfold(images, weight.shape[-2:], **geometry)
        gradients.append(torch.einsum("ol,npl->nop", slope_OL, patches).flatten(1))
    return torch.cat(outputs).T, torch.cat(gradients).T
