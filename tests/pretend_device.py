"""A pretend accelerator, through torch's Python backend PrivateUse1: real numbers, and errors when devices mix.

A tensor of the device wraps one in the processor's memory, and every operation on it is the processor's, so that bits
are equal. As on a real device, an operation refuses tensors of both kinds (but for numbers without dimensions and
copies), NumPy cannot look at them, and memory is limited if a test says so. It proves where things are placed, and
neither speed nor determinism. Importing this module makes the device known to torch, in this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME, NUM_DEVICES = "pretend", 2
aten = torch.ops.aten
CROSSING = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
BOTH = "Expected all tensors to be on the same device, but {} got tensors on cpu and on the pretend device"


class _Memory:
    """How many bytes of the device are taken."""

    def __init__(self) -> None:
        self.taken = self.peak = 0
        self.limit: int | None = None
        self.refused, self.owed = 0, False
        self.without_double = False
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._sizes: dict[int, int] = {}

    def hold(self, inner: Tensor) -> None:
        """Count the memory behind a tensor, until nobody holds it any more."""
        storage = inner.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        count = self._sizes.get(key, 0)
        self._sizes[key] = count + 1
        if not count:
            self.taken += size
        self.peak = max(self.peak, self.taken)
        self.owed |= self.limit is not None and self.taken > self.limit
        if self.owed and torch._C._current_graph_task_id() == -1:  # torch ends the process at errors within backward
            self.release(key, size)
            self.refused, self.owed = self.refused + 1, False
            raise torch.OutOfMemoryError(f"pretend out of memory: {size} bytes asked, limit {self.limit}")

    def release(self, key: int, size: int) -> None:
        """Give back the memory behind a tensor."""
        self._sizes[key] -= 1
        if not self._sizes[key]:
            del self._sizes[key]
            self.taken -= size


MEMORY = _Memory()


class PretendTensor(Tensor):
    """A tensor on the pretend device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, index: int = 0) -> PretendTensor:
        with torch.inference_mode(False):  # views of tensors of inference and of others cannot be told apart here
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(NAME, index),
                requires_grad=False,
            )
        MEMORY.hold(inner)
        storage = inner.untyped_storage()
        if storage.nbytes():
            weakref.finalize(made, MEMORY.release, storage.data_ptr(), storage.nbytes())
        made.inner = inner
        return made

    def untyped_storage(self) -> Any:
        """What tells one piece of memory from another is the memory behind it."""
        return self.inner.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse NumPy, as any device does."""
        raise TypeError("can't convert pretend:0 device type tensor to numpy: use Tensor.cpu() first")

    def tolist(self) -> Any:
        """Return the values, as any device does."""
        return self.inner.tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"PretendTensor({self.inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        return PretendTensor(self.inner.clone())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_there(func, args, kwargs or {})


def run_there(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation where its tensors are; refuse tensors that are in both places."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    asked = kwargs.get("device")
    if not there and (asked is None or torch.device(asked).type != NAME):
        return func(*args, **kwargs)
    if there and func not in CROSSING and any(leaf.dim() for leaf in leaves if not isinstance(leaf, PretendTensor)):
        raise RuntimeError(BOTH.format(func))
    if func is aten._local_scalar_dense.default:
        return there[0].inner.item()
    inner = {**kwargs}
    goes_there = bool(there)
    if asked is not None:
        goes_there = torch.device(asked).type == NAME
        inner["device"] = torch.device("cpu")
    inner.pop("pin_memory", None)
    found = func(*tree_map(_inner, args), **tree_map(_inner, inner))
    if func is aten._to_copy.default and any(found is leaf.inner for leaf in there):
        found = found.clone()
    if func is aten._to_copy.default and not there and found.untyped_storage().data_ptr() == args[0].data_ptr():
        found = found.clone()
    written = _written(func, args, kwargs)
    return _outside(found, written, goes_there)


def _outside(found: Any, written: list[Any], goes_there: bool) -> Any:
    """Wrap what came out; what an operation writes to comes out as itself."""
    own = {id(each.inner): each for each in written if isinstance(each, PretendTensor)}

    def out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in own:
            return own[id(value)]
        if MEMORY.without_double and goes_there and value.dtype == torch.float64:
            raise TypeError("Cannot convert to float64: the pretend device has none")
        return PretendTensor(value) if goes_there else value

    return tree_map(out, found)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    places = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendTensor) else value


class PretendMode(TorchDispatchMode):
    """Makes tensors on the device where a function that makes tensors is asked to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_there(func, args, kwargs or {})


class Module:
    """What torch asks of a device: `torch.pretend`."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return NUM_DEVICES

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def memory_allocated(device: object = None) -> int:
        return MEMORY.taken

    @staticmethod
    def memory_reserved(device: object = None) -> int:
        return MEMORY.taken

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        return MEMORY.peak

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        MEMORY.peak = MEMORY.taken

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        total = 1 << 34 if MEMORY.limit is None else MEMORY.limit
        return max(0, total - MEMORY.taken), total


@contextmanager
def at_most(num_bytes: int) -> Iterator[_Memory]:
    """Let the device have so much memory beyond what is taken."""
    MEMORY.limit, MEMORY.refused, MEMORY.owed = MEMORY.taken + num_bytes, 0, False
    try:
        yield MEMORY
    finally:
        MEMORY.limit, MEMORY.owed = None, False


@contextmanager
def without_double() -> Iterator[None]:
    """Let the device have no float64, as those of Apple have none."""
    MEMORY.without_double = True
    try:
        yield
    finally:
        MEMORY.without_double = False


@contextmanager
def known() -> Iterator[None]:
    """Let functions that make tensors make them on the device, in this thread, which also runs backward passes.

    A thread of torch's own ends the process where Python raises that memory ran out.
    """
    with MODE, torch.autograd.set_multithreading_enabled(False):
        yield


def there(tensor: Tensor) -> PretendTensor:
    """Return a tensor on the device."""
    return PretendTensor(tensor)


def _empty(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    return PretendTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inner(target).copy_(_inner(source))
    return target


torch.ones(1, requires_grad=True).sum().backward()  # torch begins its threads now, none of them for the device
backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
MODE = PretendMode()
_LIBRARY = torch.library.Library("aten", "IMPL")  # for torch.tensor, which looks at no mode
_LIBRARY.impl("empty_strided", _empty, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
for _name, _steps in (  # torch takes a fused kernel of its own for other devices, which the processor lacks
    ("lstm.input", decompositions.lstm_impl),
    ("gru.input", decompositions.gru_impl),
    ("rnn_tanh.input", decompositions.rnn_tanh_input),
    ("rnn_relu.input", decompositions.rnn_relu_input),
):
    _LIBRARY.impl(_name, _steps, "AutogradPrivateUse1")
