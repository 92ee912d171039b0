"""What a model keeps beside tensors and may change in its forward pass: counters, short lists, generators of its own.

Such things would make a client's result depend on who was trained before it in the same process. So every client
starts from the first values, as it does with buffers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

SINGLE = (bool, int, float, complex, str, bytes, type(None))
SEVERAL = (list, tuple, set, frozenset, dict, deque)
LONGEST = 1000
"""Values of a list that is looked through: longer ones are vocabularies and the like, not counters."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, its parts, its hooks and whether it is training."""


class Attributes:
    """The attributes of a model's modules as they were at first, as far as they are plain values or generators."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [(module, frozenset(vars(module))) for module in model.modules()]
        self._first: list[tuple[nn.Module, str, Any, Any]] = []
        for module, names in self._names:
            for name in sorted(names - OF_TORCH):
                state = _state(vars(module)[name])
                if state is not None:
                    self._first.append((module, name, state, _copy(vars(module)[name])))

    def changed(self) -> list[str]:
        """The names of the attributes that have, or are, new plain values; a tensor may be stored and never read."""
        now = [(name, state, _state(vars(module).get(name))) for module, name, state, _ in self._first]
        return [name for name, before, after in now if after not in (None, before)] + [name for _, name in self._new()]

    def restore(self) -> None:
        """Give every changed attribute its first value, and take away what is new."""
        for module, name in self._new():
            delattr(module, name)
        for module, name, state, first in self._first:
            value = vars(module).get(name, ...)
            if value is not first and _state(value) != state:
                setattr(module, name, _copy(first))

    def _new(self) -> list[tuple[nn.Module, str]]:
        new = [(module, vars(module).keys() - names) for module, names in self._names if len(vars(module)) > len(names)]
        return [(module, name) for module, more in new for name in sorted(more) if _state(vars(module)[name])]


@contextmanager
def as_before(model: nn.Module) -> Iterator[Attributes]:
    """Let a model be tried, and give it back all that it had: its attributes and buffers, and their values.

    Mapping over clients may leave tensors behind in a model that are good for nothing afterwards. A model that makes
    its tensors when it is first used is left as that makes it.
    """
    attributes = Attributes(model)
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        yield attributes
        return
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield attributes
    finally:
        for module, own, named in kept:
            vars(module).clear()
            vars(module).update(own)
            module._buffers.update(named)
        attributes.restore()
        for buffer, value in buffers:
            buffer.copy_(value)


def _state(value: Any) -> Any:
    """Something that compares equal as long as a value has not changed; None if that cannot be said of it."""
    if isinstance(value, SINGLE):
        return repr(value)
    if isinstance(value, SEVERAL) and len(value) <= LONGEST:
        parts = [_state(each) for each in (value.items() if isinstance(value, dict) else value)]
        return None if None in parts else (type(value).__name__, parts)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return None


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return deepcopy(value)
