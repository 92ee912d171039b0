"""Devices: where clients' work is computed, in which precision, and what torch is told for it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from atoll.core.errors import PlanError

AUTO, CPU = "auto", "cpu"
WITHOUT_NUMBERS = ("meta",)
"""Devices of torch on which nothing is computed."""
WITHOUT_DOUBLE = ("mps",)
"""Devices that have no float64, in which sums of evaluations are made."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 1024.0
"""What a loss in fp16 is multiplied by before the backward pass, as small gradients would be zero there."""
KEPT_SHARE = 0.5
"""The data stay on a device if they take at most this share of what is free."""

Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True)
class Place:
    """The device, precision and TF32 of an engine, as a plan says them."""

    device: str = CPU
    precision: Precision = "float32"
    tf32: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is the processor in full precision."""
        return self == PLAIN

    @property
    def on_cpu(self) -> bool:
        """Whether tensors stay in the processor's memory."""
        return self.torch_device.type == CPU

    @property
    def torch_device(self) -> torch.device:
        """The device itself; "auto" must have been settled."""
        return torch.device(self.device)

    def described(self) -> dict[str, object]:
        """Return what differs from the defaults, as a plan would say it."""
        said = {"device": self.device, "precision": self.precision, "tf32": self.tf32}
        return {key: value for key, value in said.items() if value != getattr(PLAIN, key)}

    def numbered(self, index: int) -> Place:
        """Return this place on one of several devices of its kind."""
        return Place(f"{self.torch_device.type}:{index}", self.precision, self.tf32)


PLAIN = Place()


def settled(place: Place, *, double: bool = False) -> Place:
    """Return a place whose device is there: "auto" is the first accelerator that torch finds, or else the processor.

    `double` says whether float64 is needed, which not every accelerator has.
    """
    if place.device == AUTO:
        found = accelerator()
        usable = found is not None and not (double and found in WITHOUT_DOUBLE)
        return Place(found if usable and found else CPU, place.precision, place.tf32 and found == "cuda")
    kind, index = parsed(place.device)
    num = num_devices(kind)
    if not num or (index or 0) >= num:
        found = accelerator()
        there = ", ".join([CPU, *([] if found is None else (f"{found}:{i}" for i in range(num_devices(found))))])
        raise PlanError(
            f'engine.device is "{place.device}", which torch {torch.__version__} does not find (here is {there}): '
            'set engine.device to "auto" or "cpu", or install a torch that is built for this device'
        )
    return place


def parsed(device: str) -> tuple[str, int | None]:
    """Return the kind and the number of a device, such as "cuda:1"; PlanError if torch knows no such kind.

    >>> parsed("cuda:1"), parsed("mps")
    (('cuda', 1), ('mps', None))
    """
    try:
        found = torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise PlanError(
            f'engine.device must be "auto", "cpu", "cuda", "cuda:1", "mps" or another device of torch, got '
            f"{device!r}: correct it"
        ) from error
    return found.type, found.index


def accelerator() -> str | None:
    """Return the kind of accelerator that torch finds here, if any."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def num_devices(kind: str) -> int:
    """Return how many devices of a kind torch finds here."""
    if kind == CPU:
        return 1
    module = None if kind in WITHOUT_NUMBERS else _module(kind)
    if module is None or not getattr(module, "is_available", lambda: False)():
        return 0
    return int(getattr(module, "device_count", lambda: 1)())


def _module(kind: str) -> Any:
    """Return torch's module for a kind of device; None if there is none."""
    try:
        return torch.get_device_module(kind)
    except (RuntimeError, AttributeError):
        return None


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes of a device's memory can still be taken; None if nobody says."""
    module = _module(device.type)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(free + unused)
    if hasattr(module, "recommended_max_memory"):
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return None


def peak_memory(device: torch.device, work: Callable[[], object]) -> int | None:
    """Return how many bytes some work takes at its peak, beyond what was taken before; None if nobody measures."""
    module = _module(device.type)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    work()
    return int(module.max_memory_allocated(device) - before)


def give_back_memory(device: torch.device) -> None:
    """Give memory that torch, or an error that was handled, keeps for later back to a device."""
    gc.collect()
    module = _module(device.type)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def generator_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's generator; None for the processor, and where there is none."""
    draw = None if device.type == CPU else getattr(_module(device.type), "get_rng_state", None)
    state: Tensor | None = None if draw is None else draw(device)
    return state


@contextmanager
def seeded_device(device: torch.device, seed: int) -> Iterator[None]:
    """Let a device's generator begin at a seed, and be afterwards as if nobody had drawn."""
    before, module = generator_state(device), _module(device.type)
    if before is None or module is None:
        yield
        return
    module.set_rng_state(torch.Generator(device).manual_seed(seed % (1 << 63)).get_state(), device)
    try:
        yield
    finally:
        module.set_rng_state(before, device)


class TorchSettings:
    """What torch is told for a place: the same operations in every run, and whether products may be rounded to TF32."""

    def __init__(self, place: Place) -> None:
        self._before: list[Callable[[], object]] = []
        if place.torch_device.type != "cuda":
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        wanted: list[tuple[Any, str, bool]] = [
            (matmul, "allow_tf32", place.tf32),
            (cudnn, "allow_tf32", place.tf32),
            (cudnn, "deterministic", True),
            (cudnn, "benchmark", False),
        ]
        for owner, name, value in wanted:
            self._before.append(_setter(owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        was, warned = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._before.append(lambda: torch.use_deterministic_algorithms(was, warn_only=warned))
        torch.use_deterministic_algorithms(True, warn_only=True)

    def restore(self) -> None:
        """Tell torch what it was told before."""
        while self._before:
            self._before.pop()()


def _setter(owner: Any, name: str, value: bool) -> Callable[[], object]:
    return lambda: setattr(owner, name, value)


def compute_in(model: nn.Module, place: Place) -> nn.Module:
    """Let a model compute in the precision of a place, and give outputs as before: losses and sums stay as they are."""
    if place.precision not in DTYPES:
        return model
    forward, kind, dtype = model.forward, place.torch_device.type, DTYPES[place.precision]

    @wraps(forward)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, cache_enabled=False):
            outputs = forward(*args, **kwargs)
        return tree_map(_widened, outputs)

    model.forward = lowered
    return model


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in DTYPES.values() else value


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return named tensors on a device."""
    return {name: value.to(device) for name, value in tensors.items()}
