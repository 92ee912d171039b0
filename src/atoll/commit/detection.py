"""What detection makes of a round: trust in each client, who is quarantined, and how often that was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atoll.core.detection import Detector, RoundView


class Judgement(NamedTuple):
    """What is known of the clients after a round."""

    trust: dict[int, float]
    """Of every client that was ever looked at."""
    quarantined: tuple[int, ...]
    clients: dict[str, dict[str, float]]
    """What was seen of this round's clients: the distance to the aggregate, the cosine with it, and trust."""


def judged(
    detector: Detector,
    clients: Sequence[int],
    view: RoundView,
    trust: Mapping[int, float],
    quarantined: tuple[int, ...],
    most: int,
) -> Judgement:
    """Look at a round; at most `most` clients more are quarantined, those with the least trust first."""
    now = detector.trust(view).tolist()
    found = dict(trust)
    for client, value in zip(clients, now, strict=True):
        found[client] = detector.decay * trust.get(client, 1.0) + (1 - detector.decay) * value
    low = sorted((found[client], client) for client in clients if found[client] < detector.threshold)
    fresh = [client for _, client in low[: max(0, most)]]
    seen = zip(clients, view.comparison.distance_C.tolist(), view.comparison.cosine_C.tolist(), strict=True)
    facts = {
        str(client): {"distance": round(far, 6), "cosine": round(cos, 6), "trust": round(found[client], 6)}
        for client, far, cos in seen
    }
    return Judgement(found, tuple(sorted({*quarantined, *fresh})), facts)


def how_right(quarantined: Sequence[int], attackers: frozenset[int]) -> dict[str, float]:
    """Precision: the share of the quarantined that are bad. Recall: the share of the bad that are quarantined.

    >>> how_right([1, 2, 3, 4], frozenset({1, 2, 9}))
    {'precision': 0.5, 'recall': 0.6666666666666666}
    """
    if not attackers:
        return {}
    hits = len(attackers.intersection(quarantined))
    found: dict[str, float] = {"precision": hits / len(quarantined)} if quarantined else {}
    return {**found, "recall": hits / len(attackers)}


def detection_row(judgement: Judgement, attackers: frozenset[int]) -> dict[str, Any]:
    """What the metrics say of detection after a round."""
    quarantined = list(judgement.quarantined)
    return {"quarantined": quarantined, **how_right(quarantined, attackers), "clients": judgement.clients}
