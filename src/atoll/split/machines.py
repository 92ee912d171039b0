"""Client and server of split learning as machines: `handle(state, message) -> (state, messages)`, without I/O.

A message that is not due raises SplitError before anything changes: the state that was given, and the layers, are as
they were. A value that is not finite raises NotFinite, and the session cannot go on. Layers (`Half`) are changed in
place, by one step of the optimiser a batch.

Shapes: B samples of a piece of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.algorithm import Batch
from atoll.split.cut import Cut
from atoll.split.half import Half
from atoll.split.messages import (
    ROWS,
    TARGETS,
    VALUES,
    Kind,
    Message,
    RowsDiffer,
    SplitError,
    must_be_finite,
    piece_sizes,
)
from atoll.split.session import (
    Grads,
    Phase,
    Session,
    added,
    filled,
    must_be_due,
    must_fit_batch,
    must_have_shape,
)
from atoll.split.shield import OPEN, Place, Shield
from atoll.split.targets import read_targets, sent_targets

NONE: Mapping[int, Tensor] = MappingProxyType({})
NO_ROWS = torch.empty(0, dtype=torch.uint8)
"""Stands for a commitment that was not sent."""
CLIENT_DUE = {
    Phase.WAITING: (Kind.WEIGHTS,),
    Phase.TRAINING: (Kind.OUTPUTS, Kind.GRADIENTS),
    Phase.DONE: (),
}
"""What a client takes in each phase; outputs only where it has the tail."""
SERVER_DUE = {
    Phase.TRAINING: (Kind.ACTIVATIONS, Kind.OUTPUT_GRADIENTS),
    Phase.CLOSING: (Kind.WEIGHTS,),
    Phase.DONE: (),
}
"""What a server takes in each phase; gradients of outputs only where clients have the tail."""


class ClientState(NamedTuple):
    """A client in a session."""

    phase: Phase = Phase.WAITING
    step: int = 0
    """Number of the present batch."""
    batch: Batch | None = None
    num_sent: int = 0
    """Pieces of the batch that were sent."""
    activations: Mapping[int, Tensor] = NONE
    """Piece -> outputs of the head, whose gradient is due."""
    tail_done: frozenset[int] = frozenset()
    """Pieces that went through the tail."""
    grads: Grads | None = None
    """Sum of the gradients of the pieces so far."""
    loss: Tensor | None = None
    losses: tuple[Tensor, ...] = ()
    """Loss of each batch before, where the client has the labels."""


@dataclass(frozen=True, kw_only=True)
class ClientMachine:
    """The clients' side of one task."""

    cut: Cut
    half: Half
    session: Session
    load: Callable[[int], Batch]
    """Number of a batch -> its samples."""
    in_flight: int
    """Pieces that may be on their way at a time."""
    sends_labels: bool = True
    """Whether labels go up beside activations, unless it has the tail; of several holders one has them."""
    rows: bytes = b""
    """Commitment to its rows in their order, sent with the first activations; empty if there is none."""
    shield: Shield = OPEN
    """Its defences."""

    def handle(self, state: ClientState, message: Message) -> tuple[ClientState, list[Message]]:
        """Process a message; return the messages that go up in answer."""
        due = [kind for kind in CLIENT_DUE[state.phase] if kind != Kind.OUTPUTS or self.cut.tail is not None]
        must_be_due(message, state.phase, due, state.step)
        if message.kind == Kind.WEIGHTS:
            must_have_shape(message, (self.half.job.spec.num_params,))
            self.half.restore(message.values)
            return self._begin(ClientState(phase=Phase.TRAINING))
        must_fit_batch(message, self.session, self.cut.tail_shape if message.kind == Kind.OUTPUTS else self.cut.shape)
        done = message.kind == Kind.OUTPUTS and message.piece in state.tail_done
        if message.piece not in state.activations or done:
            raise SplitError(
                f"got {message.kind.name.lower()} of piece {message.piece}, which is not on its way: answer each once"
            )
        if message.kind == Kind.OUTPUTS:
            return self._through_tail(state, message)
        if self.cut.tail is not None and message.piece not in state.tail_done:
            raise SplitError(f"got gradients of piece {message.piece} before its outputs: send the outputs first")
        return self._back(state, message)

    def _begin(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Take the next batch, or send the layers if there is none."""
        if state.step == self.session.num_steps:
            weights = self._message(Kind.WEIGHTS, state, 0, {VALUES: self.half.vector})
            return state._replace(phase=Phase.DONE, batch=None), [weights]
        state = state._replace(batch=self.load(state.step), num_sent=0, tail_done=frozenset(), grads=None, loss=None)
        return self._send(state)

    def _send(self, state: ClientState) -> tuple[ClientState, list[Message]]:
        """Send as many pieces of the batch as may be on their way."""
        batch, messages = state.batch, list[Message]()
        assert batch is not None
        sizes, activations = piece_sizes(len(batch.y), self.session.pieces), dict(state.activations)
        while state.num_sent < len(sizes) and len(activations) < self.in_flight:
            piece, rows = state.num_sent, _rows(sizes, state.num_sent)
            self.half.seed_dropout(self.session.dropout_seed(state.step))
            outputs_B = self.shield.shaped(self.half.stage("head")(batch.x[rows]))
            must_be_finite("the activations", outputs_B.detach())
            activations[piece] = outputs_B
            arrays = {VALUES: self.shield.sent(outputs_B.detach(), place_of(self.session, state.step, piece))}
            if self.cut.tail is None and self.sends_labels:
                arrays[TARGETS] = sent_targets(self.half.job, batch.y[rows])
            if self.rows and state.step == piece == 0:
                arrays[ROWS] = torch.frombuffer(bytearray(self.rows), dtype=torch.uint8)
            messages.append(self._message(Kind.ACTIVATIONS, state, piece, arrays))
            state = state._replace(num_sent=piece + 1)
        return state._replace(activations=activations), messages

    def _through_tail(self, state: ClientState, message: Message) -> tuple[ClientState, list[Message]]:
        """Compute the loss behind the tail, and its gradient by what came in."""
        batch, half = state.batch, self.half
        assert batch is not None
        rows = _rows(piece_sizes(len(batch.y), self.session.pieces), message.piece)
        leaves = half.leaves
        inputs_B = half.job.inputs(message.values).requires_grad_()
        half.seed_dropout(self.session.dropout_seed(state.step))
        outputs_B = half.stage("tail")(inputs_B)
        loss = (half.job.loss(outputs_B, batch.y[rows]) * batch.weight[rows]).sum()
        must_be_finite("the losses", loss.detach())
        *grads, by_inputs = torch.autograd.grad(loss, [*leaves, inputs_B], allow_unused=True)
        state = state._replace(
            grads=added(state.grads, filled(grads, leaves)),
            loss=loss.detach() if state.loss is None else state.loss + loss.detach(),
            tail_done=state.tail_done | {message.piece},
        )
        back = torch.zeros_like(inputs_B) if by_inputs is None else by_inputs
        back = self.shield.perturbed(back, batch.y[rows], place_of(self.session, state.step, message.piece))
        return state, [self._message(Kind.OUTPUT_GRADIENTS, state, message.piece, {VALUES: back})]

    def _back(self, state: ClientState, message: Message) -> tuple[ClientState, list[Message]]:
        """Go back through the head; with the last piece take a step and the next batch."""
        batch, half, leaves = state.batch, self.half, self.half.leaves
        assert batch is not None
        activations = dict(state.activations)
        outputs_B = activations.pop(message.piece)
        by_outputs_B = half.job.inputs(message.values)
        x_B = batch.x[_rows(piece_sizes(len(batch.y), self.session.pieces), message.piece)]
        pull_B = self.shield.pull(x_B, outputs_B, len(x_B) / len(batch.y))
        by_outputs_B = by_outputs_B if pull_B is None else by_outputs_B + pull_B
        found = torch.autograd.grad(outputs_B, leaves, by_outputs_B, allow_unused=True) if leaves else ()
        grads = added(state.grads, filled(found, leaves))
        state = state._replace(activations=activations, grads=grads)
        if state.num_sent < len(piece_sizes(len(batch.y), self.session.pieces)):
            return self._send(state)
        if activations:
            return state, []
        half.step(grads, self.session.lr)
        losses = state.losses if state.loss is None else (*state.losses, state.loss)
        return self._begin(state._replace(step=state.step + 1, losses=losses))

    def _message(self, kind: Kind, state: ClientState, piece: int, arrays: Mapping[str, Tensor]) -> Message:
        num_samples = 0 if state.batch is None or kind == Kind.WEIGHTS else len(state.batch.y)
        pieces = len(piece_sizes(num_samples, self.session.pieces)) if num_samples else 1
        return Message(kind, self.session.task.client, state.step, piece, pieces, num_samples, arrays)


class Forward(NamedTuple):
    """A piece in the body: what came in from each holder, and what came out."""

    inputs: Mapping[int, Tensor]
    outputs_B: Tensor
    """The loss, where the server has the labels."""


class ServerState(NamedTuple):
    """The server in a session."""

    phase: Phase = Phase.TRAINING
    step: int = 0
    num_samples: int = 0
    """Samples of the present batch; 0 before its first message."""
    arrived: Mapping[int, Mapping[int, Message]] = MappingProxyType({})
    """Piece -> holder -> activations that wait for those of other holders."""
    forwards: Mapping[int, Forward] = MappingProxyType({})
    """Piece -> what waits for the gradient by its outputs."""
    begun: frozenset[int] = frozenset()
    """Pieces of the batch that went into the body."""
    num_done: int = 0
    grads: Grads | None = None
    loss: Tensor | None = None
    losses: tuple[Tensor, ...] = ()
    began_at: int = 0
    """Steps that the server's layers had taken when the batch began."""
    weights: Mapping[int, Tensor] = NONE
    """Holder -> its layers at the end."""


@dataclass(frozen=True, kw_only=True)
class ServerMachine:
    """The server's side of one task, of one holder of samples or of several that hold columns of the same samples."""

    cut: Cut
    half: Half
    session: Session
    holders: Mapping[int, tuple[int, ...]]
    """Number of each holder -> shape of its activations for one sample; those of several are laid side by side."""
    labels: int
    """The holder that has the labels, or the tail."""
    takes_weights: bool = True
    """Whether holders send their layers at the end."""
    sizes: Mapping[int, int] | None = None
    """Holder -> values of its layers, where those of several differ."""
    shield: Shield = OPEN
    """Defences of the labels against holders that have none."""
    names: Sequence[str] = ()
    """What holders are called, if they have names."""

    def handle(self, state: ServerState, message: Message) -> tuple[ServerState, list[Message]]:
        """Process a message; return the messages that go down in answer."""
        due = [k for k in SERVER_DUE[state.phase] if k != Kind.OUTPUT_GRADIENTS or self.cut.tail is not None]
        must_be_due(message, state.phase, due, state.step)
        if message.holder not in self.holders:
            raise SplitError(
                f"got a message of client {message.holder}, but this session is of {', '.join(map(str, self.holders))}"
            )
        if message.kind == Kind.WEIGHTS:
            return self._close(state, message)
        shape = self.cut.tail_shape if message.kind == Kind.OUTPUT_GRADIENTS else self.holders[message.holder]
        must_fit_batch(message, self.session, shape)
        if state.num_samples not in (0, message.num_samples):
            kind = SplitError if len(self.holders) == 1 else RowsDiffer
            raise kind(
                f"got a batch of {message.num_samples} samples of {self._called(message.holder)}, but its first piece "
                f"said {state.num_samples}: send one batch at a time, of the rows that all have"
            )
        if state.begun and state.began_at != self.half.num_steps:
            raise SplitError("the server's layers took a step of another client within this batch: finish it first")
        state = state._replace(num_samples=message.num_samples)
        if message.kind == Kind.OUTPUT_GRADIENTS:
            return self._back(state, message)
        return self._arrived(state, message)

    def _arrived(self, state: ServerState, message: Message) -> tuple[ServerState, list[Message]]:
        """Keep activations until all holders have sent theirs; then go through the body."""
        here = dict(state.arrived.get(message.piece, {}))
        if message.piece in state.begun or message.holder in here:
            raise SplitError(f"got the activations of piece {message.piece} twice: send each once")
        targets = None
        if self.cut.tail is None and message.holder == self.labels:
            targets = read_targets(self.half.job, message)
        elif TARGETS in message.arrays:
            raise SplitError(f"got labels of client {message.holder}, which should keep them: leave them out")
        here[message.holder] = message
        others = {piece: each for piece, each in state.arrived.items() if piece != message.piece}
        if len(here) < len(self.holders):
            return state._replace(arrived={**others, message.piece: here}), []
        if state.step == message.piece == 0:
            self._must_have_same_rows(here)
        if targets is None and self.cut.tail is None:
            targets = read_targets(self.half.job, here[self.labels])
        began_at = state.began_at if state.begun else self.half.num_steps
        state = state._replace(arrived=others, begun=state.begun | {message.piece}, began_at=began_at)
        return self._through_body(state, message, here, targets)

    def _must_have_same_rows(self, here: Mapping[int, Message]) -> None:
        """Refuse holders that commit to other rows, or to another order, than the one with the labels."""
        tags = {holder: message.arrays.get(ROWS, NO_ROWS) for holder, message in here.items()}
        others = [self._called(each) for each in sorted(tags) if not torch.equal(tags[each], tags[self.labels])]
        if others:
            raise RowsDiffer(
                f"the rows of {' and '.join(others)} are not those of {self._called(self.labels)}, which has the "
                "labels, or are in another order: align them anew, e.g. by atoll align"
            )

    def _called(self, holder: int) -> str:
        return self.names[holder] if self.names else f"client {holder}"

    def _through_body(
        self, state: ServerState, message: Message, here: Mapping[int, Message], targets: Tensor | None
    ) -> tuple[ServerState, list[Message]]:
        job, piece = self.half.job, message.piece
        inputs = {holder: job.inputs(here[holder].values).requires_grad_() for holder in self.holders}
        parts = list(inputs.values())
        joined_B = parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)
        self.half.seed_dropout(self.session.dropout_seed(state.step))
        outputs_B = self.half.stage("body")(joined_B)
        if targets is None:
            must_be_finite("the outputs of the server's layers", outputs_B.detach())
            state = state._replace(forwards={**state.forwards, piece: Forward(inputs, outputs_B)})
            return state, [_answer(message, Kind.OUTPUTS, self.labels, outputs_B.detach())]
        weight_B = torch.full((len(targets),), 1 / state.num_samples, dtype=job.spec.dtype)
        loss = (job.loss(outputs_B, targets) * weight_B).sum()
        must_be_finite("the losses", loss.detach())
        state = state._replace(loss=loss.detach() if state.loss is None else state.loss + loss.detach())
        return self._finished(state, message, Forward(inputs, loss), None, targets)

    def _back(self, state: ServerState, message: Message) -> tuple[ServerState, list[Message]]:
        """Go back through the body from the gradient by its outputs."""
        forwards = dict(state.forwards)
        if message.piece not in forwards or message.holder != self.labels:
            raise SplitError(
                f"got gradients of the outputs of piece {message.piece} from client {message.holder}, which were not "
                "asked for: answer each once"
            )
        forward = forwards.pop(message.piece)
        by_outputs_B = self.half.job.inputs(message.values)
        return self._finished(state._replace(forwards=forwards), message, forward, by_outputs_B)

    def _finished(
        self,
        state: ServerState,
        message: Message,
        forward: Forward,
        by_outputs_B: Tensor | None,
        targets: Tensor | None = None,
    ) -> tuple[ServerState, list[Message]]:
        """Send gradients to the holders, and with the last piece of the batch take a step.

        Holders that have no labels get gradients that the shield has perturbed, where the server has the `targets`.
        """
        leaves, inputs = self.half.leaves, forward.inputs
        found = torch.autograd.grad(forward.outputs_B, [*leaves, *inputs.values()], by_outputs_B, allow_unused=True)
        grads = filled(found, [*leaves, *inputs.values()])
        by_inputs = dict(zip(inputs, grads[len(leaves) :], strict=True))
        must_be_finite("the gradients at the cut", *by_inputs.values())
        for holder, grad_B in by_inputs.items():
            if targets is not None and holder != self.labels:
                place = Place(self.session.task.attempt, holder, state.step, message.piece)
                by_inputs[holder] = self.shield.perturbed(grad_B, targets, place)
        answers = [_answer(message, Kind.GRADIENTS, holder, grad_B) for holder, grad_B in by_inputs.items()]
        state = state._replace(grads=added(state.grads, grads[: len(leaves)]), num_done=state.num_done + 1)
        if state.num_done < message.pieces:
            return state, answers
        assert state.grads is not None
        self.half.step(state.grads, self.session.lr)
        step = state.step + 1
        phase = Phase.TRAINING
        if step == self.session.num_steps:
            phase = Phase.CLOSING if self.takes_weights else Phase.DONE
        losses = state.losses if state.loss is None else (*state.losses, state.loss)
        return ServerState(phase=phase, step=step, losses=losses), answers

    def _close(self, state: ServerState, message: Message) -> tuple[ServerState, list[Message]]:
        """Take a holder's layers at the end."""
        size = self.cut.client.spec.num_params if self.sizes is None else self.sizes[message.holder]
        must_have_shape(message, (size,))
        if message.holder in state.weights:
            raise SplitError(f"got the weights of client {message.holder} twice: send them once")
        weights = {**state.weights, message.holder: message.values}
        phase = Phase.DONE if len(weights) == len(self.holders) else Phase.CLOSING
        return state._replace(phase=phase, weights=weights), []


def _answer(message: Message, kind: Kind, holder: int, values: Tensor) -> Message:
    """Return the answer to a piece of a batch."""
    return message._replace(kind=kind, holder=holder, arrays={VALUES: values})


def place_of(session: Session, step: int, piece: int) -> Place:
    """Return where a piece of a batch stands in a run."""
    return Place(session.task.attempt, session.task.client, step, piece)


def _rows(sizes: list[int], piece: int) -> slice:
    """Return which samples of a batch are in a piece."""
    start = sum(sizes[:piece])
    return slice(start, start + sizes[piece])
