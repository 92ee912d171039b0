"""The consent of a client's owner to runs."""

from __future__ import annotations

from collections.abc import Callable, Collection

from atoll.network.protocol.messages import RunInfo

Consent = Callable[[RunInfo, Collection[str]], str | None]
"""(description of a run, runs agreed to before) -> why the client does not take part; None if the owner agrees."""


def every_run(info: RunInfo, before: Collection[str]) -> str | None:
    """Agree to every run that the floors allow."""
    return None


def asked_for(runs: Collection[str] = (), ask: Callable[[str], bool] | None = None) -> Consent:
    """Agree to runs of these names, or without names to the first run; ask the owner for any other.

    An owner who joins a federation agrees to the run for which it was set up. A run that the operator adds later costs
    computing and privacy again: without somebody to `ask` it is refused.
    """

    def consent(info: RunInfo, before: Collection[str]) -> str | None:
        if info.run in runs or not (runs or before):
            return None
        if ask is not None:
            agreed = ask(f"take part in run {info.run}? {_described(info)}")
            return None if agreed else f"this client's owner does not agree to run {info.run}"
        return (
            f"this client's owner has not agreed to run {info.run}: join with --runs {info.run}, or with --all-runs to "
            "take part in every run that the floors allow"
        )

    return consent


def _described(info: RunInfo) -> str:
    """Summarise a run for its owner's decision."""
    algorithm = info.plan.get("algorithm", "fedavg")
    name = algorithm.get("name", "fedavg") if isinstance(algorithm, dict) else algorithm
    cost = "not private" if info.epsilon is None else f"epsilon {info.epsilon:.3g}"
    return f"({name}, {info.plan.get('rounds', '?')} rounds, {info.num_bytes:,} bytes, {cost})"
