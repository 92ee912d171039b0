"""Record a function of tensors as a flat list of operations, so that running it again costs no Python above them.

Mapping over clients and differentiating happen once, while recording; what is left are the plain operations underneath.
A recording repeats what was done once. What would have to be decided, drawn or counted anew each time is refused:
replaying it would be wrong and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tag, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from atoll.train.devices import generator_state


class Unrecordable(Exception):
    """A function does what a flat list of operations cannot repeat; the message says what."""


class Recording(NamedTuple):
    """A list of operations that can still be changed, and the module that holds its constants."""

    root: torch.nn.Module
    graph: Graph

    def function(self) -> GraphModule:
        """Make a function of the operations: it takes one tensor for each input, and returns a list."""
        return GraphModule(self.root, self.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that reaches the bottom, with the tensors that it reads and makes."""

    def __init__(self, graph: Graph, root: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = graph, root
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id names a tensor only while the tensor lives
        self.inside: set[int] = set()  # memory of inputs and of what is computed from them
        self.outside: set[int] = set()  # memory of constants

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Recording has nothing to do with the compiler, whose import costs two seconds."""
        return False

    def name(self, tensor: Tensor, node: Node) -> None:
        """Remember which node stands for a tensor, and the shape that it has now: `unsqueeze_` may change it later."""
        node.meta["val"] = tensor.detach()
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        memory = memory_of(tensor)
        if node.op == "get_attr":
            self.outside.add(memory)
        elif memory not in self.outside:
            self.inside.add(memory)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; one that was not made here is a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            if value.numel() and memory_of(value) in self.inside:
                raise Unrecordable("a tensor leaves the computation by .data or .numpy() and comes back")
            attribute = f"constant_{len(self.alive)}"
            self.root.register_buffer(attribute, value, persistent=False)
            self.name(value, self.graph.get_attr(attribute))
        return self.nodes[id(value)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = self.graph.call_function(func, tree_map(self.node_of, args), tree_map(self.node_of, kwargs or {}))
        for written in written_by(node):
            if memory_of(written.meta["val"]) in self.outside:
                raise Unrecordable(f"{func} changes a tensor that outlives the step, such as a buffer")
        result = _unless_refused(func, args, kwargs or {})
        if isinstance(result, Tensor):
            self.name(result, node)
        elif isinstance(result, tuple | list):
            for position, item in enumerate(result):
                if isinstance(item, Tensor):
                    self.name(item, self.graph.call_function(_item, (node, position)))
        return result


def memory_of(tensor: Tensor) -> int:
    """What tells one piece of memory from another, as long as it is held: views share theirs."""
    return int(tensor.untyped_storage()._cdata)


def written_by(node: Node) -> list[Node]:
    """The nodes whose tensors an operation changes in place, by its schema."""
    leaves: list[Node] = []
    for position, name in _written_arguments(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        leaves += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
    return leaves


@cache
def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation changes in place."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write)


def _unless_refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, and refuse it if running it again would have to draw or to decide anew."""
    by_number = func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    if Tag.data_dependent_output in func.tags or (Tag.dynamic_output_shape in func.tags and not by_number):
        raise Unrecordable(f"{func} makes the computation depend on the values of a tensor")
    if Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    before = _generators(devices)
    result = func(*args, **kwargs)  # attention has the tag, but draws nothing unless it drops something
    own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    if own or before != _generators(devices):
        raise Unrecordable(f"{func} draws random numbers, which would be the same in every step")
    return result


def _generators(devices: set[torch.device]) -> list[object]:
    """Return the states of torch's own generators, of the processor and of some devices."""
    states = [torch.get_rng_state(), *(generator_state(device) for device in devices)]
    return [None if state is None else state.tolist() for state in states]


def _item(values: Any, position: int) -> Any:
    return values[position]


def record(function: Callable[..., Any], args: tuple[Any, ...]) -> Recording:
    """Run a function once and return its operations; what it changes in place is changed, so pass copies.

    Their inputs are the leaves of `args` in order, one tensor each, and their outputs the leaves of the result.
    """
    graph, root = Graph(), torch.nn.Module()
    recorder = _Recorder(graph, root)
    for number, leaf in enumerate(tree_leaves(args)):
        recorder.name(leaf, graph.placeholder(f"input_{number}"))
    with recorder:
        result = function(*args)
    graph.output([recorder.node_of(leaf) for leaf in tree_leaves(result)])
    return Recording(root, graph)
