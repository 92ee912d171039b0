"""Tidy a recorded step: drop operations that do nothing, and fuse updates into the products that make the gradients.

`W += -lr * (A @ B)` as two operations writes and reads a gradient as large as W; `W.baddbmm_(-lr * A, B)` does not.
For small batches that is most of a step's memory traffic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
SAME_IF_SAME_SHAPE = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}


def tidy(graph: GraphModule) -> None:
    """Improve a recorded step in place; what it computes stays the same up to rounding."""
    _drop_no_ops(graph)
    for node in list(graph.graph.nodes):
        if node.target is aten.addcmul_.default and len(node.args) == 3 and not node.kwargs:
            _fuse_update(graph, node)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        node.meta.clear()  # let go of the recorded tensors
    graph.recompile()


def _shape(node: object) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _drop_no_ops(graph: GraphModule) -> None:
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or _shape(source) is None:
            continue
        same = node.target in SAME_IF_SAME_SHAPE and _shape(node) == _shape(source)
        times_one = node.target is aten.mul.Scalar and node.args[1] == 1
        if same or times_one or node.target is aten.detach.default:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def _fuse_update(graph: GraphModule, update: Node) -> None:
    """Turn weight.addcmul_(product, rate) into weight.baddbmm_(rate * left, right)."""
    weight, product, rate = update.args
    transposed = False
    while isinstance(product, Node) and len(product.users) == 1 and product.target is aten.transpose.int:
        if set(product.args[1:]) not in ({1, 2}, {-1, -2}):
            return
        transposed, product = not transposed, product.args[0]
    if not (isinstance(product, Node) and product.target is aten.bmm.default and len(product.users) == 1):
        return
    if len(_shape(weight) or ()) != 3 or len(_shape(rate) or ()) != 3:
        return
    left, right = product.args
    with graph.graph.inserting_before(update):
        if transposed:  # (L R)^T = R^T L^T
            left, right = (graph.graph.call_function(aten.transpose.int, (m, 1, 2)) for m in (right, left))
        scaled = graph.graph.call_function(aten.mul.Tensor, (left, rate))
        fused = graph.graph.call_function(aten.baddbmm_.default, (weight, scaled, right))
    update.replace_all_uses_with(fused)
    graph.graph.erase_node(update)
