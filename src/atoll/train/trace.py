"""Record a function of tensors as a flat list of operations, so that running it again costs no Python above them.

Mapping over clients and differentiating happen once, while recording; what is left are the plain operations underneath.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that reaches the bottom, with the tensors that it reads and makes."""

    def __init__(self, graph: Graph, root: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = graph, root
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id names a tensor only while the tensor lives

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Recording has nothing to do with the compiler, whose import costs two seconds."""
        return False

    def name(self, tensor: Tensor, node: Node) -> None:
        """Remember which node stands for a tensor."""
        node.meta["val"] = tensor
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; one that was not made here is a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            attribute = f"constant_{len(self.alive)}"
            self.root.register_buffer(attribute, value, persistent=False)
            self.name(value, self.graph.get_attr(attribute))
        return self.nodes[id(value)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = self.graph.call_function(func, tree_map(self.node_of, args), tree_map(self.node_of, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.name(result, node)
        elif isinstance(result, tuple | list):
            for position, item in enumerate(result):
                if isinstance(item, Tensor):
                    self.name(item, self.graph.call_function(_item, (node, position)))
        return result


def _item(values: Any, position: int) -> Any:
    return values[position]


def record(function: Callable[..., Any], args: tuple[Any, ...]) -> GraphModule:
    """Run a function once and return its operations; what it changes in place is changed, so pass copies.

    The result takes the leaves of `args` in order, one tensor each, and returns the leaves of the result as a list.
    """
    graph, root = Graph(), torch.nn.Module()
    recorder = _Recorder(graph, root)
    for number, leaf in enumerate(tree_leaves(args)):
        recorder.name(leaf, graph.placeholder(f"input_{number}"))
    with recorder:
        result = function(*args)
    graph.output([recorder.node_of(leaf) for leaf in tree_leaves(result)])
    return GraphModule(root, graph)
