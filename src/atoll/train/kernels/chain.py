"""A model as a chain of layers that the kernels know, and training it by them. Shapes: D parameters, B samples."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.params import ParamSpec

MOST_LAYERS = 31
MOST_POOLED = 15
"""The widest window of pooling: which of its places is largest is kept in a byte."""


class Unsuited(Exception):
    """The kernels cannot do what a job asks for; the message says what."""


class Layer(Structure):
    """One layer with weights, and ReLU and pooling behind it; as in chain.h."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("is_conv", "relu", "pool", "in_c", "in_h", "in_w", "out_c", "kernel_h", "kernel_w", "stride", "pad"),
            *("weight_at", "bias_at", "channels", "height", "width", "conv_h", "conv_w", "out_h", "out_w"),
            *("rows", "wide", "packed_at", "packed_bias_at", "sample"),
        )
    )


class Data(Structure):
    """The samples and their labels; as in train.c."""

    _fields_ = (
        *(("bytes", c_void_p), ("floats", c_void_p), ("labels", c_void_p), ("sample", c_int64)),
        *(("scale", c_float), ("shift", c_float)),
    )


class Step(Structure):
    """How weights are moved by their gradient; as in chain.h."""

    _fields_ = (
        *((name, c_float) for name in ("lr", "momentum", "decay", "pull")),
        *(("nesterov", c_int64), ("plain", c_int64)),  # from `plain` on the kernels fill in
        *((name, c_void_p) for name in ("velocity", "anchor", "shift")),
    )


def layers_of(model: nn.Module, spec: ParamSpec, input_shape: tuple[int, ...]) -> list[Layer]:
    """Lay a model out for the kernels; Unsuited if it is not a chain that they know."""
    if spec.dtype != torch.float32:
        raise Unsuited("kernels compute in single precision")
    if spec.buffers or spec.kept or next(model.buffers(), None) is not None:
        raise Unsuited("the model has buffers, or parameters that clients keep")
    places = {slot.name: slot for slot in spec.slots}
    if {name for name, _ in model.named_parameters()} != places.keys():
        raise Unsuited("some parameters are not trained")
    layers, shape = list[Layer](), tuple(input_shape)
    for name, module in _chain(model, ""):
        if isinstance(module, nn.Linear | nn.Conv2d):
            if layers and not layers[-1].relu:
                raise Unsuited("layers follow each other without ReLU between them")
            weight, bias = places.pop(f"{name}weight", None), places.pop(f"{name}bias", None)
            if weight is None or (bias is None) != (module.bias is None):
                raise Unsuited("layers share their weights")
            at = weight.offset, -1 if bias is None else bias.offset
            conv = isinstance(module, nn.Conv2d)
            layer, shape = _convolution(module, shape, at) if conv else _linear(module, shape, layers, at)
            layers.append(layer)
        else:
            shape = _after(module, shape, layers)
    if not 0 < len(layers) <= MOST_LAYERS or len(shape) != 1 or layers[-1].relu or layers[-1].is_conv:
        raise Unsuited("the last layer is not linear")
    if len({id(parameter) for parameter in model.parameters()}) != 2 * len(layers) - sum(
        layer.bias_at < 0 for layer in layers
    ):
        raise Unsuited("layers share their weights")
    return layers


def _chain(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested sequences in order, with the beginning of their parameters' names."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, each, None) for each in hooks) or "forward" in vars(module):
        raise Unsuited(f"{type(module).__name__} has hooks")
    if type(module) is nn.Sequential:
        for key, each in module._modules.items():  # a child that occurs twice is named twice
            assert each is not None
            yield from _chain(each, f"{name}{key}.")
    elif type(module) in (nn.Linear, nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Identity):
        yield name, module
    else:
        raise Unsuited(f"there is no kernel for {type(module).__name__}")


def _linear(
    module: nn.Module, shape: tuple[int, ...], layers: list[Layer], at: tuple[int, int]
) -> tuple[Layer, tuple[int, ...]]:
    assert isinstance(module, nn.Linear)
    if len(shape) != 1 or shape[0] != module.in_features:
        raise Unsuited("a linear layer gets something else than flat samples of its size")
    image: tuple[int, ...] = (1, 1, shape[0])
    if layers and layers[-1].is_conv:
        image = _output_shape(layers[-1])
    layer = Layer(relu=0, pool=1, out_c=module.out_features, kernel_h=1, kernel_w=1, stride=1)
    layer.in_c, layer.in_h, layer.in_w = image
    layer.weight_at, layer.bias_at = at
    return layer, (module.out_features,)


def _convolution(module: nn.Module, shape: tuple[int, ...], at: tuple[int, int]) -> tuple[Layer, tuple[int, ...]]:
    assert isinstance(module, nn.Conv2d)
    stride, pad = _both(module.stride), _both(module.padding)
    if len(shape) != 3 or shape[0] != module.in_channels:
        raise Unsuited("a convolution gets something else than images of its channels")
    if module.groups != 1 or _both(module.dilation) != 1 or module.padding_mode != "zeros":
        raise Unsuited("there is no kernel for convolutions in groups, with holes, or with a border that is not zero")
    high, wide = module.kernel_size
    layer = Layer(is_conv=1, relu=0, pool=1, out_c=module.out_channels, kernel_h=high, kernel_w=wide)
    layer.in_c, layer.in_h, layer.in_w = shape
    layer.stride, layer.pad = stride, pad
    layer.weight_at, layer.bias_at = at
    return layer, _output_shape(layer)


def _output_shape(layer: Layer) -> tuple[int, ...]:
    """Return the shape of an image behind a convolution and what follows it."""
    sizes = (layer.in_h + 2 * layer.pad - layer.kernel_h, layer.in_w + 2 * layer.pad - layer.kernel_w)
    high, wide = ((size // layer.stride + 1) // layer.pool for size in sizes)
    if min(sizes) < 0 or high < 1 or wide < 1:
        raise Unsuited("images are smaller than a kernel or a window")
    return (layer.out_c, high, wide)


def _after(module: nn.Module, shape: tuple[int, ...], layers: list[Layer]) -> tuple[int, ...]:
    """Return the shape behind a module without weights, which is done with the layer before it."""
    if isinstance(module, nn.Flatten):
        if module.start_dim != 1 or module.end_dim != -1:
            raise Unsuited("there is no kernel for flattening a part of a sample")
        return (math.prod(shape),)
    if isinstance(module, nn.ReLU):
        if not layers:
            raise Unsuited("the model begins with ReLU")
        layers[-1].relu = 1
    if isinstance(module, nn.MaxPool2d):
        size = _both(module.kernel_size)
        plain = _both(module.padding) == 0 and _both(module.dilation) == 1 and not module.ceil_mode
        if not layers or not layers[-1].is_conv or len(shape) != 3 or layers[-1].pool != 1:
            raise Unsuited("pooling does not follow a convolution")
        if not plain or module.return_indices or _both(module.stride or size) != size or size > MOST_POOLED:
            raise Unsuited("there is no kernel for windows that overlap, have a border or holes")
        layers[-1].pool = size
        return _output_shape(layers[-1])
    return shape


def _both(size: Any) -> int:
    """Return what holds for both directions of an image."""
    sizes = {size} if isinstance(size, int) else set(size) if isinstance(size, tuple) else set()
    if len(sizes) != 1 or not isinstance(found := sizes.pop(), int):
        raise Unsuited("there is no kernel for different sizes in the two directions of an image")
    return found


class Chain:
    """A chain of layers, its packed weights and the memory that its kernels work in."""

    def __init__(self, library: ctypes.CDLL, layers: list[Layer], num_params: int, most: int) -> None:
        self._library, self.num, self.num_params, self.most = library, len(layers), num_params, most
        self._layers = (Layer * len(layers))(*layers)
        library.atoll_plan.restype = library.atoll_rooms.restype = c_int64
        self.num_packed = int(library.atoll_plan(self._layers, c_int64(self.num)))
        size = library.atoll_rooms(self._layers, c_int64(self.num), c_int64(most), None, None)
        self.num_outputs = int(self._layers[self.num - 1].out_c)
        self._memory, self._scratch = torch.zeros(int(size)), torch.zeros(4 * self.num_packed)

    @staticmethod
    def room(library: ctypes.CDLL, layers: list[Layer], most: int) -> int:
        """Return how many numbers the kernels need to work with, for batches of at most so many samples."""
        planned, num = (Layer * len(layers))(*layers), c_int64(len(layers))
        library.atoll_plan.restype = library.atoll_rooms.restype = c_int64
        library.atoll_plan(planned, num)
        return int(library.atoll_rooms(planned, num, c_int64(most), None, None))

    def packed(self, flat_D: Tensor) -> Tensor:
        """Return parameters as the kernels want them."""
        flat_D, packed = flat_D.contiguous(), torch.empty(self.num_packed)
        self._library.atoll_pack(
            self._layers, c_int64(self.num), c_int64(self.num_packed), _pointer(flat_D), _pointer(packed)
        )
        return packed

    def train(
        self,
        data: Data,
        starts: Sequence[Tensor],
        shifts: Sequence[Tensor | None],
        batches: Sequence[Sequence[np.ndarray]],
        steps: Sequence[Step],
    ) -> tuple[Tensor, list[float]]:
        """Train clients, each from its flat vector on its batches of indices, with a shift of its gradients or none.

        Returns by what their vectors moved (G, D), and the mean of each one's losses.
        """
        num = len(starts)
        all_batches = [batch for each in batches for batch in each]
        index = np.concatenate(all_batches, dtype=np.int64)
        sizes = np.array([len(batch) for batch in all_batches], dtype=np.int64)
        num_steps = np.array([len(each) for each in batches], dtype=np.int64)
        held = [[None if each is None else each.contiguous() for each in some] for some in (starts, shifts)]
        delta_GD, losses = torch.empty(num, self.num_params), (c_double * num)()
        pointers = [(c_void_p * num)(*(None if t is None else t.data_ptr() for t in some)) for some in held]
        self._library.atoll_train(
            *(self._layers, c_int64(self.num), c_int64(self.num_packed), ctypes.byref(data), c_int64(num), *pointers),
            *(c_void_p(array.ctypes.data) for array in (index, sizes, num_steps)),
            *((Step * num)(*steps), c_int64(self.most), c_int64(self.num_params), _pointer(delta_GD), losses),
            *(_pointer(self._scratch), _pointer(self._memory)),
        )
        return delta_GD, list(losses)

    def outputs(self, data: Data, index: np.ndarray, packed: Tensor) -> Tensor:
        """Return the model's outputs for samples."""
        index = np.ascontiguousarray(index, dtype=np.int64)
        outputs = torch.empty(len(index), self.num_outputs)
        self._library.atoll_outputs(
            *(self._layers, c_int64(self.num), ctypes.byref(data), c_void_p(index.ctypes.data), c_int64(len(index))),
            *(c_int64(self.most), _pointer(packed), _pointer(outputs), _pointer(self._memory)),
        )
        return outputs


def _pointer(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
