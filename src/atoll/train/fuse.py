"""Tidy a recorded step: drop operations that do nothing, and fuse updates into the products that make the gradients.

`W += -lr * (A @ B)` as two operations writes and reads a gradient as large as W; `W.baddbmm_(-lr * A, B)` does not.
For small batches that is most of a step's memory traffic; for small models the number of operations is what counts.

Steps change tensors in place, and views share memory with what they show. So every rewrite asks first whether what it
leaves out, merges or moves is written to where that would show (`_Writes`), and leaves the step as it is if in doubt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tag, Tensor
from torch.fx import Graph, Node

from atoll.train.trace import memory_of, written_by

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
SAME_IF_SAME_SHAPE = {*VIEWS, aten.expand.default}
RESHAPES = {*SAME_IF_SAME_SHAPE, aten.unsqueeze.default}
REPEATABLE = {aten.neg.default, aten.mul.Tensor, aten.view.default, aten.unsqueeze.default}
"""Cheap operations that algorithms and optimisers tend to repeat for every layer."""


def tidy(graph: Graph) -> None:
    """Improve a recorded step in place; what it computes stays the same up to rounding."""
    _drop_no_ops(graph)
    _drop_ones(graph)
    _drop_zeros(graph)
    for node in list(graph.nodes):
        if _is_update(node):
            _split_update(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if _is_update(node):
            _fuse_update(graph, node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            _fuse_bias(graph, node)
    _drop_no_ops(graph)
    _share_repeated(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.meta.clear()  # let go of the recorded tensors


def hoist(graph: Graph, num_fixed: int) -> Graph:
    """Take out of a step what depends on its last `num_fixed` inputs alone, so that it is computed once, not each step.

    Returns operations on those inputs; what they give, the step takes as further inputs.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = set(inputs[len(inputs) - num_fixed :])
    known = fixed | {node for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
    changed = {each for node in graph.nodes for each in written_by(node)}
    once = Graph()
    copies = {node: once.placeholder(node.name) for node in inputs if node in fixed}
    moved = [node for node in graph.nodes if node in known and node not in fixed and not changed & known]
    for node in moved:
        copies[node] = once.node_copy(node, copies.__getitem__)
    results = [node for node in moved if node.op == "call_function" and not known.issuperset(node.users)]
    once.output([copies[node] for node in results])
    with graph.inserting_after(inputs[-1]):
        for node in reversed(results):  # each is inserted right after the old inputs
            node.replace_all_uses_with(graph.placeholder(f"once_{node.name}"))
    graph.eliminate_dead_code()
    return once


class _Writes:
    """Which memory a step writes to, and where in the step; good until operations are added or moved."""

    def __init__(self, graph: Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.places: dict[int, list[int]] = {}
        self.reshaped: set[int] = set()  # memory of tensors whose shape is changed in place, as by unsqueeze_
        for node, place in self.place.items():
            for written in written_by(node):
                memory = memory_of(written.meta["val"])
                self.places.setdefault(memory, []).append(place)
                if Tag.inplace_view in getattr(node.target, "tags", ()):
                    self.reshaped.add(memory)

    def kept(self, node: Any, start: Node, end: Node | None = None) -> bool:
        """Whether what a node stands for is not written to after `start`, until `end` or to the end of the step."""
        if not isinstance(node, Node):
            return True
        if "val" not in node.meta:
            return False  # several tensors, or nothing is known about it
        last = len(self.place) if end is None else self.place[end]
        return not any(self.place[start] < place < last for place in self.places.get(memory_of(node.meta["val"]), []))

    def replace(self, node: Node, other: Node) -> bool:
        """Use `other`, which has the same values when `node` is computed, instead of `node`, if that never shows."""
        if "val" not in node.meta or "val" not in other.meta:
            return False
        ours, theirs = node.meta["val"], other.meta["val"]
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        views: dict[Node, Tensor] = {}
        if memory_of(ours) == memory_of(theirs):  # whoever writes to one writes to the other
            if memory_of(ours) in self.reshaped or _strides(ours) != _strides(theirs):
                return False
        else:
            last = self._follow(node, theirs, views) if self.kept(node, node) else None
            if last is None or _order(ours) != _order(theirs) or not self.kept(other, node, last):
                return False
        for view, value in views.items():
            view.meta["val"] = value
        node.replace_all_uses_with(other)
        return True

    def _follow(self, node: Node, value: Tensor, views: dict[Node, Tensor]) -> Node | None:
        """Collect what the views of a node show once it has another value; return who looks last, None if one fails."""
        last = node
        for user in node.users:
            end: Node | None = user
            if user.args[0] is node and _is_view(user):
                try:
                    views[user] = user.target(value, *user.args[1:], **user.kwargs)  # type: ignore[operator]
                except RuntimeError:  # a view of memory that does not lie like this
                    return None
                end = self._follow(user, views[user], views) if isinstance(views[user], Tensor) else None
            if end is None:
                return None
            last = max(last, end, key=self.place.__getitem__)
        return last


def _is_view(node: Node) -> bool:
    """Whether a node shows memory of its first argument, and writes to nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return node.target is aten._unsafe_view.default or any(each.alias_info is not None for each in schema.returns)


def _strides(tensor: Tensor) -> list[int]:
    """How a tensor lies in memory: the strides of the dimensions that have any length."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _order(tensor: Tensor) -> list[int]:
    """In which order a tensor's dimensions lie in memory; what is computed from it value by value lies likewise."""
    strides = _strides(tensor)
    return sorted(range(len(strides)), key=lambda dim: -strides[dim]) if all(strides) else strides


def _shape(node: object) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _memory(node: object) -> int | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return memory_of(value) if isinstance(value, Tensor) else None


def _drop_no_ops(graph: Graph) -> None:
    """Drop views of the same shape, products with 1, detached copies and pairs of transpositions."""
    writes = _Writes(graph)
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        same = node.target in SAME_IF_SAME_SHAPE
        times_one = node.target is aten.mul.Scalar and node.args[1] == 1
        if _transposes(node) and _transposes(source):
            source = source.args[0]
        elif not (same or times_one or node.target is aten.detach.default):
            continue
        if isinstance(source, Node):
            writes.replace(node, source)
    graph.eliminate_dead_code()


def _drop_ones(graph: Graph) -> None:
    """Drop products with ones: a backward pass starts from a one, spread to the shape of the losses."""
    writes = _Writes(graph)
    ones: set[Any] = set()
    for node in list(graph.nodes):
        if node.target is aten.ones_like.default or (node.target in RESHAPES and node.args[0] in ones):
            if not writes.places.get(memory_of(node.meta["val"])):
                ones.add(node)
        elif node.target is aten.mul.Tensor and len(ones & set(node.args)) == 1:
            (other,) = (each for each in node.args if each not in ones)
            if isinstance(other, Node):
                writes.replace(node, other)
    graph.eliminate_dead_code()


def _drop_zeros(graph: Graph) -> None:
    """Drop sums with zeros: private steps add them to a layer's output to learn the slope there."""
    writes = _Writes(graph)
    for node in list(graph.nodes):
        value, zeros = node.args[:2] if node.target is aten.add.Tensor else (None, None)
        if not (isinstance(zeros, Node) and zeros.target is aten.new_zeros.default and isinstance(value, Node)):
            continue
        if writes.kept(zeros, zeros, node):
            writes.replace(node, value)
    graph.eliminate_dead_code()


def _share_repeated(graph: Graph) -> None:
    """Compute equal things once, as long as nothing that they read, and nothing that they give, is changed."""
    writes = _Writes(graph)
    seen: dict[object, Node] = {}
    for node in list(graph.nodes):
        if node.target not in REPEATABLE or node.kwargs:
            continue
        key = (node.target, repr(node.args))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        same = all(writes.kept(each, first, node) for each in (first, *node.all_input_nodes))
        if same and writes.replace(node, first):
            graph.erase_node(node)


def _fuse_bias(graph: Graph, node: Node) -> None:
    """Turn bias + left @ right of stacked clients into one operation."""
    bias, product = node.args[:2]
    if not (isinstance(product, Node) and product.target is aten.bmm.default and len(product.users) == 1):
        return
    writes = _Writes(graph)
    if not isinstance(bias, Node) or not all(writes.kept(each, product, node) for each in product.args):
        return
    if bias.meta["val"].dtype != product.meta["val"].dtype:
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
    if len(total.users) > 1 or update.users or _shape(rate) != (_shape(flat)[0], 1):
        return
    grads: Any = total.args[0]
    layers = _layers(graph, flat, [grad for grad in grads if _shape(grad)[-1]])
    if layers is None:
        return
    writes = _Writes(graph)  # all of these are read after the first of the updates that take the place of one
    if not all(_steady(writes, each, flat, update) for each in [t for _, t in terms] + [g for _, g in layers]):
        return
    with graph.inserting_before(update):
        against = graph.call_function(aten.neg.default, (rate,))
        pull = next((each for each in terms if _pull(writes, flat, each[1], update)[0] is not None), None)
        if pull is not None:  # flat += rate * strength * (flat - goal), before flat changes
            goal, strength = _pull(writes, flat, pull[1], update)
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


def _steady(writes: _Writes, node: Any, target: Any, update: Node, since: Node | None = None) -> bool:
    """Whether a value has the type of an update's target, none of its memory, and is not written to before the update.

    Such a value may be read later than it is now: after other parts of the target have changed.
    """
    if not isinstance(node, Node) or "val" not in node.meta:
        return False
    if node.meta["val"].dtype != target.meta["val"].dtype or _memory(node) == _memory(target):
        return False
    return writes.kept(node, since or node, update)


def _layers(graph: Graph, flat: Any, grads: list[Node]) -> list[tuple[Node, Node]] | None:
    """The layers behind a row of flat gradients: the input that views its part of the flat vector, and its gradient."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    whole: Tensor = flat.meta["val"]
    position, found = int(whole.storage_offset()), []
    for flattened in grads:
        leaf = next((node for node in inputs if _starts(node, whole, position, _shape(flattened)[-1])), None)
        grad = flattened
        while grad.target is aten.clone.default or (_shape(grad) != _shape(leaf) and grad.target in VIEWS):
            grad = grad.args[0]  # type: ignore[assignment]
        if leaf is None or _shape(grad) != _shape(leaf):
            return None
        found.append((leaf, grad))
        position += _shape(flattened)[-1]
    return found


def _starts(node: Node, whole: Tensor, position: int, size: int) -> bool:
    value = node.meta["val"]
    same = memory_of(value) == memory_of(whole) and value is not whole
    return same and value.storage_offset() == position and value[0].numel() == size


def _pull(writes: _Writes, flat: Any, term: Node, update: Node) -> tuple[Any, Any]:
    """If a term is strength * (flat - goal), with neither changed until the update, the goal and the strength."""
    if term.target is aten.mul.Tensor and len(term.users) == 1 and not term.kwargs:
        gap, strength = term.args
        if isinstance(gap, Node) and gap.target is aten.sub.Tensor and not gap.kwargs and gap.args[0] is flat:
            steady = _steady(writes, gap.args[1], flat, update, since=gap) and writes.kept(flat, gap, update)
            return (gap.args[1], strength) if steady and isinstance(strength, int | float) else (None, None)
    return None, None


def _fuse_update(graph: Graph, update: Node) -> None:
    """Turn weight.addcmul_(product, rate) into weight.baddbmm_(rate * left, right), or addmm_ for a single client."""
    weight, product, rate = update.args
    if len(_shape(weight)) != 3 or _shape(rate) != (_shape(weight)[0], 1, 1) or _shape(product) != _shape(weight):
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
    writes = _Writes(graph)
    if update.users or not all(_steady(writes, each, weight, update, since=product) for each in (left, right)):
        return  # a weight that is a factor in another's gradient may have moved already
    with graph.inserting_before(update):
        if transposed:  # (L R)^T = R^T L^T
            left, right = _transposed(graph, right), _transposed(graph, left)
        if alone:
            scaled = graph.call_function(aten.mul.Tensor, (left, graph.call_function(aten.select.int, (rate, 0, 0))))
            row = graph.call_function(aten.select.int, (weight, 0, 0))
            row.meta["val"] = weight.meta["val"].select(0, 0)  # type: ignore[union-attr]
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
