"""What is known of a row that the server sees. Shapes: D parameters, M values of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from atoll.core.probe import CutKnown, CutSight, Known, Sight


class Row(NamedTuple):
    """One update that the server can read, with what is public of how it was made."""

    place: int
    """Counted over all sights, as guesses do."""
    model_M: Tensor
    """The model that the client began with."""
    delta_D: Tensor
    lr: float
    num_steps: int
    """Steps that the client took, an average one of a sum."""
    num_samples: int
    """Different samples that it took them on; 0 where it does not say how many it has."""
    batch_size: int
    """Samples of a step; 0 where it does not say how many it has."""

    def mean_gradient(self) -> Tensor:
        """Return the mean of the steps' gradients, (D,), if steps are those of plain descent."""
        return self.delta_D / (-self.lr * self.num_steps)


def rows_of(known: Known, sights: Sequence[Sight]) -> Iterator[Row]:
    """Yield all rows of all sights, in order."""
    place = 0
    for sight in sights:
        told = zip(sight.rows.delta_D, sight.num_samples_R, sight.num_clients_R, known.steps(sight), strict=True)
        for delta_D, num, clients, steps in told:
            # clients behind a sum step side by side, as one with a batch of all of theirs
            batch_size = clients * known.batch_size(max(1, round(num / clients))) if num else 0
            yield Row(
                place=place,
                model_M=sight.model_M,
                delta_D=delta_D,
                lr=known.lr(sight.version),
                num_steps=steps,
                num_samples=min(num, steps * batch_size),
                batch_size=batch_size,
            )
            place += 1


def no_tokens(known: CutKnown) -> str | None:
    """Return why samples cannot be decoded: they are tokens; None if they are numbers."""
    return None if known.elsewhere.x.is_floating_point() else "samples are ids of tokens, which no decoder gives"


def of_two_classes(known: CutKnown, sights: Sequence[CutSight]) -> str | None:
    """Return why the gradients of two classes cannot be told apart; None if they can."""
    if not any(sight.gradients_N is not None for sight in sights):
        return "labels travel beside activations, and no gradient by outputs comes to the server"
    return None if len(known.labels_K) == 2 else "it tells two classes apart, and the data have others"


def rarer(known: CutKnown) -> int:
    """Return which of two classes, 0 or 1, is the rarer one among the attacker's samples."""
    return int((known.elsewhere.y.flatten() == known.labels_K[1]).double().mean() < 0.5)
