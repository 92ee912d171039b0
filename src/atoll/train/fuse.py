"""Tidy a recorded step: drop operations that do nothing, and fuse updates into the products that make the gradients.

`W += -lr * (A @ B)` as two operations writes and reads a gradient as large as W; `W.baddbmm_(-lr * A, B)` does not.
For small batches that is most of a step's memory traffic; for small models the number of operations is what counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
SAME_IF_SAME_SHAPE = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
RESHAPES = {*SAME_IF_SAME_SHAPE, aten.unsqueeze.default}
REPEATABLE = {aten.neg.default, aten.mul.Tensor, aten.view.default, aten.unsqueeze.default}
"""Cheap operations that algorithms and optimisers tend to repeat for every layer."""


def tidy(graph: GraphModule) -> None:
    """Improve a recorded step in place; what it computes stays the same up to rounding."""
    _drop_no_ops(graph.graph)
    _drop_ones(graph.graph)
    _drop_zeros(graph.graph)
    for node in list(graph.graph.nodes):
        if _is_update(node):
            _split_update(graph.graph, node)
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if _is_update(node):
            _fuse_update(graph.graph, node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            _fuse_bias(graph.graph, node)
    _drop_no_ops(graph.graph)
    _share_repeated(graph.graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        node.meta.clear()  # let go of the recorded tensors
    graph.recompile()


def hoist(graph: GraphModule, num_fixed: int) -> GraphModule:
    """Take out of a step what depends on its last `num_fixed` inputs alone, so that it is computed once, not each step.

    Returns a function of those inputs; what it gives, the step takes as further inputs.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    fixed = set(inputs[len(inputs) - num_fixed :])
    known = fixed | {node for node in graph.graph.nodes if node.op == "get_attr"}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
    changed = {node.args[0] for node in graph.graph.nodes if getattr(node.target, "_schema", None) and _mutates(node)}
    once = Graph()
    copies = {node: once.placeholder(node.name) for node in inputs if node in fixed}
    moved = [node for node in graph.graph.nodes if node in known and node not in fixed and not changed & known]
    for node in moved:
        copies[node] = once.node_copy(node, copies.__getitem__)
    results = [node for node in moved if node.op == "call_function" and not known.issuperset(node.users)]
    once.output([copies[node] for node in results])
    with graph.graph.inserting_after(inputs[-1]):
        for node in reversed(results):  # each is inserted right after the old inputs
            node.replace_all_uses_with(graph.graph.placeholder(f"once_{node.name}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return GraphModule(graph, once)


def _shape(node: object) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _drop_no_ops(graph: Graph) -> None:
    """Drop views of the same shape, products with 1, detached copies and pairs of transpositions."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        same = node.target in SAME_IF_SAME_SHAPE and _shape(node) == _shape(source) and "val" in source.meta
        times_one = node.target is aten.mul.Scalar and node.args[1] == 1
        if same or times_one or node.target is aten.detach.default:
            node.replace_all_uses_with(source)
        elif _transposes(node) and _transposes(source):
            node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code()


def _drop_ones(graph: Graph) -> None:
    """Drop products with ones: a backward pass starts from a one, spread to the shape of the losses."""
    ones: set[Node] = set()
    for node in list(graph.nodes):
        if node.target is aten.ones_like.default or (node.target in RESHAPES and node.args[0] in ones):
            ones.add(node)
        elif node.target is aten.mul.Tensor and len(ones & set(node.args)) == 1:
            (other,) = (each for each in node.args if each not in ones)
            if isinstance(other, Node) and _shape(other) == _shape(node):
                node.replace_all_uses_with(other)
    graph.eliminate_dead_code()


def _drop_zeros(graph: Graph) -> None:
    """Drop sums with zeros: private steps add them to a layer's output to learn the slope there."""
    for node in list(graph.nodes):
        zeros = node.args[1] if node.target is aten.add.Tensor else None
        if isinstance(zeros, Node) and zeros.target is aten.new_zeros.default and _shape(node.args[0]) == _shape(node):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _share_repeated(graph: Graph) -> None:
    """Compute equal things once, as long as nothing that they read is changed in between."""
    changed = {node.args[0] for node in graph.nodes if getattr(node.target, "_schema", None) and _mutates(node)}
    seen: dict[object, Node] = {}
    for node in list(graph.nodes):
        if node.target not in REPEATABLE or node.kwargs or changed & set(node.all_input_nodes):
            continue
        key = (node.target, repr(node.args))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def _mutates(node: Node) -> bool:
    return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def _fuse_bias(graph: Graph, node: Node) -> None:
    """Turn bias + left @ right of stacked clients into one operation."""
    bias, product = node.args[:2]
    if not (isinstance(product, Node) and product.target is aten.bmm.default and len(product.users) == 1):
        return
    if len(_shape(bias)) == 3 and _shape(bias)[-1] == _shape(product)[-1] and _shape(product) == _shape(node):
        with graph.inserting_before(node):
            fused = graph.call_function(aten.baddbmm.default, (bias, *product.args))
        fused.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(fused)


def _is_update(node: Node) -> bool:
    return node.target is aten.addcmul_.default and len(node.args) == 3 and not node.kwargs


def _split_update(graph: Graph, update: Node) -> None:
    """Turn flat.addcmul_(cat(grads) + terms, rate) into one update for each term and each layer, without the cat.

    An algorithm's slot sees one flat gradient, but most only add to it; then no flat gradient need be made.
    """
    flat, total, rate = update.args
    terms: list[tuple[int, Any]] = []
    while isinstance(total, Node) and len(total.users) == 1 and not total.kwargs:
        if total.target not in (aten.add.Tensor, aten.sub.Tensor) or _shape(total) != _shape(total.args[0]):
            break
        terms.append((1 if total.target is aten.add.Tensor else -1, total.args[1]))
        total = total.args[0]
    if not (isinstance(total, Node) and total.target is aten.cat.default and total.args[1] == 1):
        return
    if len(total.users) > 1 or not all(isinstance(term, Node) for _, term in terms):
        return
    grads: Any = total.args[0]
    layers = _layers(graph, flat, [grad for grad in grads if _shape(grad)[-1]])
    if layers is None:
        return
    with graph.inserting_before(update):
        against = graph.call_function(aten.neg.default, (rate,))
        pull = next((each for each in terms if _pull(flat, each[1])[0] is not None), None)
        if pull is not None:  # flat += rate * strength * (flat - goal), before flat changes
            goal, strength = _pull(flat, pull[1])
            share = graph.call_function(aten.mul.Tensor, (against if pull[0] > 0 else rate, strength))
            graph.call_function(aten.lerp_.Tensor, (flat, goal, share))
        for sign, term in terms:
            if (sign, term) != pull:
                graph.call_function(aten.addcmul_.default, (flat, term, rate if sign > 0 else against))
        for leaf, grad in layers:
            ones = [1] * (len(_shape(leaf)) - 1)
            spread = graph.call_function(aten.view.default, (rate, [_shape(rate)[0], *ones]))
            spread.meta["val"] = rate.meta["val"].view(-1, *ones)  # type: ignore[union-attr]
            graph.call_function(aten.addcmul_.default, (leaf, grad, spread))
    graph.erase_node(update)


def _layers(graph: Graph, flat: Any, grads: list[Node]) -> list[tuple[Node, Node]] | None:
    """The layers behind a row of flat gradients: the input that views its part of the flat vector, and its gradient."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    whole: Tensor = flat.meta["val"]
    position, found = int(whole.storage_offset()), []
    for flattened in grads:
        leaf = next((node for node in inputs if _starts(node, whole, position, _shape(flattened)[-1])), None)
        grad = flattened
        while grad.target is aten.clone.default or (_shape(grad) != _shape(leaf) and grad.target in SAME_IF_SAME_SHAPE):
            grad = grad.args[0]  # type: ignore[assignment]
        if leaf is None or _shape(grad) != _shape(leaf):
            return None
        found.append((leaf, grad))
        position += _shape(flattened)[-1]
    return found


def _starts(node: Node, whole: Tensor, position: int, size: int) -> bool:
    value = node.meta["val"]
    same = value.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same and value is not whole and value.storage_offset() == position and value[0].numel() == size


def _pull(flat: Any, term: Node) -> tuple[Any, Any]:
    """If a term is strength * (flat - goal), the goal and the strength."""
    if term.target is aten.mul.Tensor and len(term.users) == 1 and not term.kwargs:
        gap, strength = term.args
        if isinstance(gap, Node) and gap.target is aten.sub.Tensor and not gap.kwargs and gap.args[0] is flat:
            return (gap.args[1], strength) if isinstance(strength, int | float) else (None, None)
    return None, None


def _fuse_update(graph: Graph, update: Node) -> None:
    """Turn weight.addcmul_(product, rate) into weight.baddbmm_(rate * left, right), or addmm_ for a single client."""
    weight, product, rate = update.args
    if len(_shape(weight)) != 3 or len(_shape(rate)) != 3:
        return
    alone = isinstance(product, Node) and product.target is aten.unsqueeze.default and product.args[1] == 0
    if alone:
        product = product.args[0]  # type: ignore[union-attr]
    transposed = False
    while isinstance(product, Node) and len(product.users) == 1 and _transposes(product):
        transposed, product = not transposed, product.args[0]
    wanted = aten.mm.default if alone else aten.bmm.default
    if not (isinstance(product, Node) and product.target is wanted and len(product.users) == 1):
        return
    left, right = product.args
    with graph.inserting_before(update):
        if transposed:  # (L R)^T = R^T L^T
            left, right = _transposed(graph, right), _transposed(graph, left)
        if alone:
            scaled = graph.call_function(aten.mul.Tensor, (left, graph.call_function(aten.select.int, (rate, 0, 0))))
            row = graph.call_function(aten.select.int, (weight, 0, 0))
            graph.call_function(aten.addmm_.default, (row, scaled, right))
        else:
            scaled = graph.call_function(aten.mul.Tensor, (left, rate))
            graph.call_function(aten.baddbmm_.default, (weight, scaled, right))
    graph.erase_node(update)


def _transposed(graph: Graph, matrix: Any) -> Node:
    node = graph.call_function(aten.transpose.int, (matrix, -2, -1))
    node.meta["val"] = matrix.meta["val"].transpose(-2, -1)
    return node


def _transposes(node: Node) -> bool:
    """Whether a node swaps the last two dimensions."""
    num_dims = len(_shape(node))
    if node.target is aten.transpose.int:
        first, second = (int(str(dim)) % num_dims for dim in node.args[1:])
        return {first, second} == {num_dims - 2, num_dims - 1}
    return node.target is aten.t.default and num_dims == 2
