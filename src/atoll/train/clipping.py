"""Sums of clipped per-sample gradients. Shapes: B samples, T places of a sample, I inputs, O outputs, D parameters.

A layer that multiplies has the gradient g^T a for a sample with input a (T, I) and slope g (T, O) at its output. Its
length follows from a and g without making it (Goodfellow 2015, arXiv:1510.01799; Li et al. 2022, arXiv:2110.05679,
section 4), and the clipped sum is one product of what the backward pass has at hand, so that there is no second one (Bu
et al. 2023, arXiv:2210.00038). Models with other layers have their gradients made sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from atoll.core.algorithm import Algorithm
from atoll.core.params import ParamSpec, float_buffers
from atoll.train.attributes import as_before
from atoll.train.federation import Federation

Loss = Callable[[Tensor, Tensor], Tensor]
Summed = Callable[[Tensor], list[Tensor]]
"""Weight of each sample -> the weighted sum of gradients, for each parameter; where it is 0, NaN does not matter."""


PAIRS_ERROR = 2.0**-16
"""The largest error of float32 sums of products over pairs of places, as a share of the sum of their sizes."""
PROBED = 5
"""Samples, with random features, on which both ways are compared before the quick one is trusted."""


class Layer(NamedTuple):
    """A layer whose per-sample gradients need not be made."""

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of its output for one sample."""
    footprint: int
    """How many numbers its rule makes of a sample."""


class LayerSums(NamedTuple):
    """What a layer says of the gradients of its parameters."""

    square_B: Tensor
    """Their squared length for each sample."""
    summed: Summed


def mixer_of(model: nn.Module) -> str | None:
    """Name what in a model mixes samples or remembers them; None if nothing does."""
    norms = [type(module).__name__ for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    buffers = [f"buffer '{name}'" for name, _ in float_buffers(model)]
    return next(iter(norms + buffers), None)


def private_layers(
    algorithm: Algorithm, federation: Federation, model: nn.Module, spec: ParamSpec, loss: Loss
) -> tuple[Layer, ...]:
    """Find the layers whose per-sample gradients need not be made."""
    if algorithm.local_loss is not None:
        return ()  # it may look at all of a sample
    x, y = federation.first(PROBED)
    if x.is_floating_point():
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=spec.dtype)
    with as_before(model):
        model.eval()  # dropout goes by the place in a batch, which differs for a sample alone
        return find_layers(model, spec, loss, x, y)


def find_layers(model: nn.Module, spec: ParamSpec, loss: Loss, x: Tensor, y: Tensor) -> tuple[Layer, ...]:
    """The layers that hold all trained parameters, if each has a rule; none if any parameter must be treated otherwise.

    The rules see a layer's input and output alone, so a model that uses a weight elsewhere, or mixes samples, would be
    clipped wrongly. On the given samples and shaken parameters both ways must therefore give the same sums.
    """
    layers = _candidates(model, spec, x)
    if not layers:
        return ()
    generator = torch.Generator().manual_seed(0)
    tensors = dict(model.named_parameters())
    named = {slot.name: tensors[slot.name].detach() for slot in spec.trainable}
    named = {n: p + 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named.items()}
    shifts = [x.new_zeros(len(y), *layer.shape, dtype=spec.dtype, requires_grad=True) for layer in layers]

    def alone(leaves: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, leaves, (x.unsqueeze(0),))
        return loss(outputs, y.unsqueeze(0)).sum()

    try:
        outputs, inputs = layer_inputs(model, layers, named, x, shifts)
        slopes = torch.autograd.grad(loss(outputs, y).sum(), shifts, materialize_grads=True)
        copies = {name: value.expand(len(y), *value.shape).clone().requires_grad_() for name, value in named.items()}
        losses_B = vmap(alone)(copies, x, y)  # torch.func.grad would import torch's compiler, which takes a second
        grads = torch.autograd.grad(losses_B.sum(), list(copies.values()), materialize_grads=True)
        each = dict(zip(copies, grads, strict=True))
    except Exception:  # whatever a model does that the quick way cannot follow, the slow way is there for it
        return ()
    parts = layer_sums(model, layers, inputs, list(slopes))
    weight_B = 1.0 + torch.arange(len(y), dtype=spec.dtype)
    quick = summed(layers, parts, weight_B)
    slow = {name: torch.tensordot(weight_B, grads, 1) for name, grads in each.items()}
    square_B = torch.stack([grads.flatten(1).square().sum(1) for grads in each.values()]).sum(0)
    ratio_B = (sum_squares(parts) + 1e-6) / (square_B + 1e-6)
    close = bool(((ratio_B > 0.999) & (ratio_B < 1.1)).all())  # a little too long is safe, too short is not
    return layers if close and all(torch.allclose(quick[n], slow[n], rtol=1e-3, atol=1e-5) for n in slow) else ()


def _candidates(model: nn.Module, spec: ParamSpec, x: Tensor) -> tuple[Layer, ...]:
    """Layers with rules that hold all trained parameters, each called once with samples first; or none."""
    wanted = [slot.name for slot in spec.trainable]
    owners = {owner: model.get_submodule(owner) for owner in dict.fromkeys(name.rpartition(".")[0] for name in wanted)}
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in owners}

    def watch(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, args, output: shapes[name].append(tuple(output.shape))

    if not all(_has_rule(module) for module in owners.values()):
        return ()
    handles = [module.register_forward_hook(watch(name)) for name, module in owners.items()]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for name, module in owners.items():
        own = [own for own in ("weight", "bias") if getattr(module, own, None) is not None]
        parameters = [f"{name}.{each}".lstrip(".") for each in own]
        if len(shapes[name]) != 1 or shapes[name][0][0] != len(x) or not set(wanted).issuperset(parameters):
            return ()
        shape, weight = shapes[name][0][1:], module.get_parameter("weight")
        places = math.prod(shape) // (shape[-1] if isinstance(module, nn.Embedding) else len(weight))
        footprint = places * weight.numel() // len(weight) + (min(weight.numel(), 2 * places**2) if places > 1 else 0)
        layers.append(Layer(name, tuple(parameters), shape, footprint))
    return tuple(layers)


def _has_rule(module: nn.Module) -> bool:
    if type(module) is nn.Linear:
        return True
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.Embedding:
        return module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq
    return False


def layer_inputs(
    model: nn.Module, layers: tuple[Layer, ...], named: Mapping[str, Tensor], x: Tensor, shifts: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of the model, and the input of each layer; layers' outputs are shifted, to ask for slopes there."""
    inputs: dict[str, Tensor] = {}

    def watch(name: str, shift: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs[name] = args[0].detach()
            return output + shift

        return hook

    handles = [
        model.get_submodule(layer.name).register_forward_hook(watch(layer.name, shift))
        for layer, shift in zip(layers, shifts, strict=True)
    ]
    try:
        outputs: Tensor = functional_call(model, dict(named), (x,))
    finally:
        for handle in handles:
            handle.remove()
    return outputs, [inputs[layer.name] for layer in layers]


def layer_sums(
    model: nn.Module, layers: tuple[Layer, ...], inputs: list[Tensor], slopes: list[Tensor]
) -> list[LayerSums]:
    """What each layer says, from its inputs and the slopes at its outputs; (B, ...), or (G, B, ...) for G clients."""
    found = []
    for layer, given, slope in zip(layers, inputs, slopes, strict=True):
        module = model.get_submodule(layer.name)
        lead = slope.shape[: slope.dim() - len(layer.shape)]
        with_bias = len(layer.parameters) == 2
        if isinstance(module, nn.Embedding):
            found.append(_looked_up(given.reshape(*lead, -1), slope.reshape(*lead, -1, slope.shape[-1]), module))
        elif isinstance(module, nn.Conv2d):
            found.append(_convolved(given, slope, lead, module, with_bias))
        else:
            a, g = (each.reshape(*lead, -1, each.shape[-1]) for each in (given, slope))
            found.append(_multiplied(a, g, with_bias))
    return found


def sum_squares(parts: list[LayerSums]) -> Tensor:
    """The squared length of each sample's gradient of all layers."""
    return torch.stack([part.square_B for part in parts]).sum(0)


def summed(layers: tuple[Layer, ...], parts: list[LayerSums], weight_B: Tensor) -> dict[str, Tensor]:
    """The weighted sum of gradients of every parameter, by name."""
    sums: dict[str, Tensor] = {}
    for layer, part in zip(layers, parts, strict=True):
        sums |= dict(zip(layer.parameters, part.summed(weight_B), strict=True))
    return sums


def finite(values: Tensor) -> Tensor:
    """Zeros in place of NaN and infinities: samples that have any get weight 0, and 0 times NaN would be NaN."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def _multiplied(a_BTI: Tensor, g_BTO: Tensor, with_bias: bool) -> LayerSums:
    """The rule of a product: gradients are g^T a; the cheapest of three ways to their lengths is taken."""
    places, many = a_BTI.shape[-2], a_BTI.shape[-1] * g_BTO.shape[-1]
    if places == 1:
        return _multiplied_once(a_BTI.squeeze(-2), g_BTO.squeeze(-2), with_bias)
    bias_BO = g_BTO.sum(-2)
    each = None if 2 * places**2 < many else g_BTO.transpose(-1, -2) @ a_BTI
    if each is None:
        square_B = _square_of_pairs(g_BTO, a_BTI @ a_BTI.transpose(-1, -2), _lengths(a_BTI))
    else:
        square_B = _square(each.flatten(-2))

    def total(weight_B: Tensor) -> list[Tensor]:
        weighted_BO = finite(bias_BO) * weight_B.unsqueeze(-1)
        if each is None:
            a, g = finite(a_BTI), finite(g_BTO) * weight_B[..., None, None]
            weight = g.flatten(-3, -2).transpose(-1, -2) @ a.flatten(-3, -2)
        else:
            flat = finite(each).flatten(-2)
            weight = (weight_B.unsqueeze(-2) @ flat).reshape(*flat.shape[:-2], *each.shape[-2:])
        return [weight, weighted_BO.sum(-2)] if with_bias else [weight]

    return LayerSums(square_B + _square(bias_BO) if with_bias else square_B, total)


def _square_of_pairs(g_BTO: Tensor, products_BTT: Tensor, lengths_BT: Tensor | float) -> Tensor:
    """|g^T a|^2 as the sum of (a a^T) * (g g^T) over pairs of places, never too small.

    What cancels out in the sum leaves an error behind that may exceed it, and a length that is too small would let a
    sample through the clip; so a bound of that error is added, a share of the square that there is if nothing cancels.
    """
    square_B = ((g_BTO @ g_BTO.transpose(-1, -2)) * products_BTT).sum((-1, -2))
    most_B = (_lengths(g_BTO) * lengths_BT).sum(-1)
    return square_B.clamp(min=0) + PAIRS_ERROR * most_B.square()


def _lengths(rows: Tensor) -> Tensor:
    """Lengths of rows, without a copy of the rows."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return length


def _square(rows: Tensor) -> Tensor:
    return _lengths(rows).square()


def _multiplied_once(a_BI: Tensor, g_BO: Tensor, with_bias: bool) -> LayerSums:
    """The rule of a product at one place: |g^T a| = |g| |a|."""
    square_B = _square(g_BO) * (_square(a_BI) + (1 if with_bias else 0))

    def total(weight_B: Tensor) -> list[Tensor]:
        a, g = finite(a_BI), finite(g_BO) * weight_B.unsqueeze(-1)
        weight = g.transpose(-1, -2) @ a
        return [weight, g.sum(-2)] if with_bias else [weight]

    return LayerSums(square_B, total)


def _convolved(given: Tensor, slope: Tensor, lead: torch.Size, module: nn.Conv2d, with_bias: bool) -> LayerSums:
    """The rule of a convolution: a product at every place, of the patch there."""
    images = given.reshape(-1, *given.shape[-3:])
    assert not isinstance(module.padding, str)
    if module.dilation == (1, 1):  # as `unfold` of images does, in a fraction of its time
        above, beside = module.padding
        padded = functional.pad(images, (beside, beside, above, above))
        windows = padded.unfold(2, module.kernel_size[0], module.stride[0])
        windows = windows.unfold(3, module.kernel_size[1], module.stride[1])
        patches = windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)
    else:
        patches = functional.unfold(images, module.kernel_size, module.dilation, module.padding, module.stride)
    a_BTI = patches.transpose(1, 2).reshape(*lead, patches.shape[2], patches.shape[1])
    g_BTO = slope.flatten(-2).transpose(-1, -2)
    part = _multiplied(a_BTI, g_BTO, with_bias)

    def total(weight_B: Tensor) -> list[Tensor]:
        weight, *bias = part.summed(weight_B)
        return [weight.reshape(*weight.shape[:-1], *module.weight.shape[1:]), *bias]

    return LayerSums(part.square_B, total)


def _looked_up(tokens_BT: Tensor, g_BTO: Tensor, module: nn.Embedding) -> LayerSums:
    """The rule of a table: equal tokens of a sample share a row."""
    same_BTT = tokens_BT.unsqueeze(-1) == tokens_BT.unsqueeze(-2)
    square_B = _square_of_pairs(g_BTO, same_BTT, 1.0)
    num_rows = module.num_embeddings

    def total(weight_B: Tensor) -> list[Tensor]:
        g = finite(g_BTO) * weight_B[..., None, None]
        lead = tokens_BT.shape[:-2]
        tables = torch.arange(lead.numel(), device=tokens_BT.device).reshape(*lead, 1, 1) * num_rows
        sums = g.new_zeros(lead.numel() * num_rows, g.shape[-1])
        sums = sums.index_add(0, (tokens_BT + tables).reshape(-1), g.reshape(-1, g.shape[-1]))
        return [sums.reshape(*lead, num_rows, g.shape[-1])]

    return LayerSums(square_B, total)
