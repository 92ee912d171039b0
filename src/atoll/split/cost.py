"""What a cut costs, known before a run: seconds of a batch, and what a client computes and keeps in memory."""

from __future__ import annotations

import copy
import heapq
import math
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.core.split import Split
from atoll.split.clock import Link, Moment
from atoll.split.columns import Holder
from atoll.split.cut import Cut
from atoll.split.messages import piece_sizes
from atoll.train.attributes import as_before
from atoll.train.job import Job
from atoll.train.seeded import seeded
from atoll.train.vertical import held


def batch_seconds(cut: Cut, split: Split, num_samples: int) -> float:
    """Return the simulated seconds of one batch, from its first message up to the last gradient down.

    Headers and labels are left out, and so are codecs, which make messages shorter.
    """
    sizes, link = piece_sizes(num_samples, split.micro_batches), Link.of(split, Moment())
    each = cut.client.spec.dtype.itemsize
    widths = [math.prod(shape) for shape in (cut.shape, *([cut.tail_shape] * 2 if cut.tail else []), cut.shape)]
    legs = [(way, each * width) for way, width in zip(("up", "down") * 2, widths, strict=False)]
    window, order, end = split.in_flight or len(sizes), count(), Moment()
    waiting = list(range(len(sizes)))
    ready = [(Moment(), next(order), piece, 0) for piece in waiting[:window]]
    waiting = waiting[window:]
    while ready:  # messages in the order in which they are ready
        now, _, piece, leg = heapq.heappop(ready)
        way, width = legs[leg]
        arrived = link.send(way, width * sizes[piece], now)
        if leg + 1 < len(legs):
            heapq.heappush(ready, (arrived, next(order), piece, leg + 1))
        else:
            end = end.later(arrived)
            if waiting:
                heapq.heappush(ready, (arrived, next(order), waiting.pop(0), 0))
    return end.seconds


class Load(NamedTuple):
    """What a client computes and keeps in memory."""

    multiply_adds: int
    """Multiply-adds of matrix products and convolutions for one sample, forward and backward."""
    parameter_bytes: int
    activation_bytes: int
    """Bytes of the outputs of all layers for one batch, which the way back needs."""


def client_load(job: Job, cut: Cut | None, num_samples: int) -> Load:
    """Return what a client's side of a model takes for batches of so many samples; of the whole model without a cut."""
    x, _ = job.federation.first(min(num_samples, job.federation.dataset.num_train))
    x = job.inputs(x)
    if cut is None:
        model = copy.deepcopy(job.model).train()
        multiply_adds, held = _measured(model, x)
        return Load(
            multiply_adds // len(x), job.spec.num_params * job.spec.dtype.itemsize, held * num_samples // len(x)
        )
    stages = copy.deepcopy(cut.client.stages)
    multiply_adds, held = _measured(stages["head"], x)
    if "tail" in stages:
        inputs = torch.zeros((len(x), *cut.tail_shape), dtype=job.spec.dtype, requires_grad=True)
        more, also_held = _measured(stages["tail"], job.inputs(inputs))
        multiply_adds, held = multiply_adds + more, held + also_held
    return Load(multiply_adds // len(x), cut.client.num_bytes, held * num_samples // len(x))


def party_load(job: Job, holder: Holder, num_samples: int) -> Load:
    """Return what a party's model takes for batches of so many rows; without a tail, which works on few values."""
    x, _ = job.federation.first(min(num_samples, job.federation.dataset.num_train))
    x = held(job.inputs(x), holder.places)
    multiply_adds, kept = _measured(copy.deepcopy(holder.cut.client.stages["head"]), x)
    return Load(multiply_adds // len(x), holder.cut.client.num_bytes, kept * num_samples // len(x))


def _measured(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the multiply-adds of a forward and a backward pass, and the bytes of the outputs of all layers."""
    held, leaves = 0, [p for p in model.parameters() if p.requires_grad]

    def add(module: nn.Module, inputs: object, outputs: object) -> None:
        nonlocal held
        held += outputs.nbytes if isinstance(outputs, Tensor) else 0

    layers = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [layer.register_forward_hook(add) for layer in layers]
    try:
        with as_before(model), seeded(0), FlopCounterMode(display=False) as counter:
            outputs = model(x)
            torch.autograd.grad(outputs.sum(), [*leaves, *([x] if x.requires_grad else [])], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return counter.get_total_flops() // 2, held
