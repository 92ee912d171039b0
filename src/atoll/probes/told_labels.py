"""Labels that travel in the open."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.probe import SAMPLE_LABELS, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates


def told_labels() -> Probe:
    """Read the labels that clients send beside activations: the server that computes the loss needs them."""

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        return [Guess(row=row, y=sight.labels_N) for row, sight in enumerate(sights) if sight.labels_N is not None]

    def why_not(known: CutKnown, sights: Sequence[CutSight]) -> str | None:
        return None if any(sight.labels_N is not None for sight in sights) else "labels stay with the clients"

    return Probe(
        goal=SAMPLE_LABELS,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=why_not,
        assumes="the server follows the protocol, which gives it labels",
    )
