"""Single samples out of a sum, by a model made for it. Shapes: H neurons, F features, B bins, N samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work
from atoll.probes.linear_leak import first_linear

FAINT = 1e-5
"""Share of the largest bias gradient below which a bin is taken for empty."""
OUTSIDE = 0.02
"""Share of the features' range by which a sample may exceed it: others are mixtures."""
FEW_VALUES = 1024
"""Features that take no more values than these are on a grid, and samples must be too."""


def trap_weights() -> Probe:
    """Plant bins in the first layer, and take differences of neighbours (Fowl et al. 2021, arXiv:2110.13057, sec. 4).

    All neurons measure one direction h, and neuron j is active for samples beyond the j-th quantile c_j of h x; its
    way on is the same for all. Then grad W_j - grad W_(j+1) is the sum over samples between the two quantiles alone,
    and (grad W_j - grad W_(j+1)) / (grad b_j - grad b_(j+1)) is the sample, exactly, where there is just one: also in a
    sum over clients, of which a secure sum tells no more than this. Quantiles are those of samples from elsewhere.
    """
    return Probe(
        goal=SAMPLES,
        run=_run,
        why_not=_why_not,
        plant=_plant,
        assumes="the server sends a model that it made up; sites with floors.max_change do not train on it",
    )


def binned_layers(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of the first two linear layers, if nothing but a ReLU is between them; None otherwise."""
    first, between = first_linear(model), list[nn.Module]()
    if first is None:
        return None
    names = [name for name, module in model.named_modules() if not list(module.children())]
    for name in names[names.index(first) + 1 :]:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            return (first, name) if [type(each) for each in between] == [nn.ReLU] else None
        if not isinstance(module, nn.Dropout | nn.Identity):
            between.append(module)
    return None


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if known.tokens:
        return "inputs are words, which no bins can be laid over"
    if binned_layers(known.model) is None:
        return "the model does not begin with two fully connected layers and a ReLU between, which the trap is laid in"
    if len(known.elsewhere.x) < 2:
        return "the server has no samples of the kind, by which it would lay the bins"
    return None


def _plant(known: Known, model_M: Tensor, work: Work) -> Tensor:
    """Return the model with bins in place of the first layer."""
    layers = binned_layers(known.model)
    assert layers is not None
    planted_M = model_M.clone()
    views = known.spec.views(planted_M)
    first_HF, bias_H = views[f"{layers[0]}.weight"], views[f"{layers[0]}.bias"]
    second = views[f"{layers[1]}.weight"]
    num_bins, num_features = first_HF.shape
    direction_F = torch.from_numpy(work.rng.standard_normal(num_features)).double()
    along_N = known.elsewhere.x.flatten(1).double() @ direction_F
    scale = 1 / (num_bins * float(along_N.std().clamp(min=1e-12)))  # a sample's activations add up to about 1
    cuts_H = torch.quantile(along_N, torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)[:-1])
    cuts_H[0] -= along_N.std()  # those below all that were seen elsewhere
    first_HF.copy_((scale * direction_F).expand_as(first_HF))
    bias_H.copy_(-scale * cuts_H)
    second.copy_(second[:, :1].expand_as(second).clone())
    return planted_M


def _run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
    guesses, grid = list[Guess](), _grid(known)
    for sight in sights:
        for delta_D in sight.rows.delta_D:
            guesses.append(_guess(known, delta_D, len(guesses), grid))
            if work.is_over():
                return guesses
    return guesses


def _grid(known: Known) -> Tensor | None:
    """Return the values that features take elsewhere, if they are few."""
    values = torch.unique(known.elsewhere.x[:200]).double()
    return values if len(values) <= FEW_VALUES else None


def _guess(known: Known, delta_D: Tensor, row: int, grid: Tensor | None) -> Guess:
    layers = binned_layers(known.model)
    assert layers is not None
    views = known.spec.without_buffers.views(delta_D.double())
    weight_HF, bias_H = views[f"{layers[0]}.weight"], views[f"{layers[0]}.bias"]
    weight_BF = weight_HF - torch.cat([weight_HF[1:], torch.zeros_like(weight_HF[:1])])
    bias_B = bias_H - torch.cat([bias_H[1:], torch.zeros_like(bias_H[:1])])
    full = bias_B.abs() > FAINT * bias_B.abs().max()
    x_NF = weight_BF[full] / bias_B[full].unsqueeze(1)
    span = known.high - known.low
    inside = ((x_NF >= known.low - OUTSIDE * span) & (x_NF <= known.high + OUTSIDE * span)).all(1)
    x_NF, sure_N = x_NF[inside], bias_B[full][inside].abs()
    if grid is not None and len(x_NF):
        sure_N = -_off_grid(x_NF, grid) / span
    order = sure_N.argsort(descending=True)
    x = x_NF[order].view(-1, *known.input_shape).to(known.spec.dtype)
    return Guess(row=row, x=x, sure_N=sure_N[order], notes={"bins": float(len(bias_B)), "filled": float(full.sum())})


def _off_grid(x_NF: Tensor, grid: Tensor) -> Tensor:
    """Return how far each sample's features are from values that features take, on average: mixtures are far."""
    place = torch.searchsorted(grid, x_NF.contiguous()).clamp(1, len(grid) - 1)
    near = torch.minimum((x_NF - grid[place]).abs(), (x_NF - grid[place - 1]).abs())
    return near.mean(1)
