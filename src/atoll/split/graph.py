"""The steps of a model's forward pass, where it can be cut, and the stages between the cuts as modules.

The forward pass is traced once, so that what lies between named layers (a flatten, a ReLU) goes with them. After a step
at which a single tensor is still needed, and nothing else, a model can be cut.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atoll.core.errors import PlanError, nearest

MAX_LISTED = 24
"""Number of layers that an error names."""


class Place(NamedTuple):
    """A layer after which, or before which, a model is cut."""

    name: str
    last: int
    """Number of the last step before the cut."""
    shape: tuple[int, ...]
    """Shape of the value that crosses the cut, for one sample."""

    @property
    def width(self) -> int:
        """The number of values that cross the cut for one sample."""
        return math.prod(self.shape)


class Traced(NamedTuple):
    """A model and the steps of its forward pass."""

    model: nn.Module
    steps: tuple[fx.Node, ...]
    """All steps but parameters and constants, which lie wherever they are needed; the first is the input."""
    shapes: Mapping[int, tuple[int, ...]]
    """Number of a step -> shape of its value for one sample, where that is a tensor with a row for each."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The layers after which the model can be cut."""
        last_step: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            last_step |= dict.fromkeys(layers_of(step), number)
        found = []
        for name, last in last_step.items():
            while last + 1 < len(self.steps) and not layers_of(self.steps[last + 1]) and not self._is_cut(last):
                last += 1  # such as the item of a pair that a layer gives
            if self._is_cut(last):
                found.append(self._place(name, last))
        return tuple(found)

    def after(self, layer: str | int, key: str) -> Place:
        """Return the place behind a layer, named or counted from 0 in a sequential model."""
        name = _name_of(self.model, layer, key)
        for place in self.places:
            if place.name == name:
                return place
        raise PlanError(
            f"{key}: the model cannot be cut after '{name}', since it is the last layer, or more than its output is "
            f"needed later: cut after one of {self._listed()}"
        )

    def before(self, layer: str | int, key: str) -> Place:
        """Return the place before the first step of a layer."""
        name = _name_of(self.model, layer, key)
        first = next((number for number, step in enumerate(self.steps) if name in layers_of(step)), 0)
        if not first or not self._is_cut(first - 1):
            raise PlanError(
                f"{key}: the model cannot be cut before '{name}', since it is the first layer, is not used, or needs "
                f"more than one value: name a layer behind one of {self._listed()}"
            )
        return self._place(name, first - 1)

    def stage(self, first: int, last: int) -> nn.Module:
        """Return the steps after step `first`, up to and with step `last`, as a module; it shares the parameters."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        copies[self._value(first)] = graph.placeholder("x")

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.node_copy(node)
            return copies[node]

        for step in self.steps[first + 1 : last + 1]:
            copies[step] = graph.node_copy(step, copied)
        graph.output(copies[self._value(last)])
        return fx.GraphModule(self.model, graph)

    def _value(self, last: int) -> fx.Node:
        """Return the step whose value is the only one that is needed after a step; of the last, its own."""
        number = crossing(self.steps, last)
        return self.steps[last if number is None else number]

    def _is_cut(self, last: int) -> bool:
        """Return whether all that is needed after a step is one tensor with a row for each sample, not the input."""
        number = crossing(self.steps, last)
        return number is not None and number > 0 and number in self.shapes

    def _place(self, name: str, last: int) -> Place:
        number = crossing(self.steps, last)
        assert number is not None
        return Place(name, last, self.shapes[number])

    def _listed(self) -> str:
        names = [place.name for place in self.places]
        return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "") if names else "none"


def trace(model: nn.Module, x: Tensor) -> Traced:
    """Trace a model's forward pass, and find where it can be cut; `x` are samples to try it on."""
    root = _traced_graph(model)
    root.graph.eliminate_dead_code()
    steps = tuple(node for node in root.graph.nodes if node.op not in ("get_attr", "output"))
    num_inputs = sum(step.op == "placeholder" for step in steps)
    if num_inputs != 1:
        raise PlanError(
            f"split: the forward pass of {type(model).__name__} takes {num_inputs} arguments, and a model that is cut "
            "takes one: wrap it in a module that does"
        )
    if next(node for node in root.graph.nodes if node.op == "output").args[0] is not steps[-1]:
        raise PlanError(
            f"split: the forward pass of {type(model).__name__} must return the value of its last step, and nothing "
            "else: return one tensor"
        )
    interpreter = fx.Interpreter(root, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(x)
    values = {number: interpreter.env[step] for number, step in enumerate(steps)}
    shapes = {number: tuple(value.shape[1:]) for number, value in values.items() if _has_rows(value, len(x))}
    return Traced(model, steps, shapes)


def layers_of(step: fx.Node) -> set[str]:
    """Return the names of the modules that a step belongs to."""
    own = {str(step.target)} if step.op == "call_module" else set()
    return own | set(step.meta.get("nn_module_stack", {}))


def crossing(steps: Sequence[fx.Node], last: int) -> int | None:
    """Return the number of the only step up to `last` whose value is needed after it; None if there are several."""
    earlier = {step: number for number, step in enumerate(steps[: last + 1])}
    needed = {each for step in steps[last + 1 :] for each in step.all_input_nodes if each in earlier}
    return earlier[needed.pop()] if len(needed) == 1 else None


def _has_rows(value: object, num_samples: int) -> bool:
    """Return whether a value is a tensor of floating-point numbers with a row for each sample."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.ndim > 1 and len(value) == num_samples


class _Tracer(fx.Tracer):
    """Traces into modules that have parts, but for those of torch and those that are named as a whole.

    While it traces, torch hands it the modules of all threads: those of others, such as of a run that trains, go on.
    """

    def __init__(self, whole: Iterable[str] = ()) -> None:
        super().__init__()
        self._whole, self._thread = set(whole), threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a module that this thread calls."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Trace an attribute that this thread looks up."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one step."""
        alone = next(m.children(), None) is None or module_qualified_name in self._whole
        return alone or super().is_leaf_module(m, module_qualified_name)


def _traced_graph(model: nn.Module) -> fx.GraphModule:
    """Trace into a model; where that fails, into the model itself alone, so that its children are whole steps."""
    error: Exception | None = None
    for whole in ((), [name for name, _ in model.named_children()]):
        try:
            return fx.GraphModule(model, _Tracer(whole).trace(model))
        except Exception as caught:
            error = caught
    raise PlanError(
        f"split: the forward pass of {type(model).__name__} cannot be followed ({' '.join(str(error).split())[:200]}): "
        "use an nn.Sequential, or a module that calls its parts one after another and does not decide by values"
    ) from error


def _name_of(model: nn.Module, layer: str | int, key: str) -> str:
    """Return a layer's name, which may be given as its place in a sequential model."""
    if isinstance(layer, int):
        names = [name for name, _ in model.named_children()]
        if not isinstance(model, nn.Sequential) or layer >= len(names):
            kind = type(model).__name__
            raise PlanError(
                f"{key} is {layer}, but {kind} is no sequential model of so many layers: name a layer, e.g. {key} = "
                f'"{names[0] if names else ""}"'
            )
        return names[layer]
    known = {name for name, _ in model.named_modules() if name}
    if layer not in known:
        raise PlanError(f"{key}: the model has no layer '{layer}': {nearest(layer, known)}")
    return layer
