"""Which runs a client takes part in: those that its owner has agreed to."""

from __future__ import annotations

from collections.abc import Callable, Collection

from atoll.network.protocol.messages import RunInfo

Consent = Callable[[RunInfo, Collection[str]], str | None]
"""(what a run is, the runs agreed to before) -> why the client does not take part; None if its owner agrees."""


def every_run(info: RunInfo, before: Collection[str]) -> str | None:
    """Agree to whatever the floors allow."""
    return None


def asked_for(runs: Collection[str] = (), ask: Callable[[str], bool] | None = None) -> Consent:
    """Agree to runs of these names, or without names to the first that there is; for any other, ask the owner.

    Who joins a federation agrees to the run that it was made for. A run that the operator adds later is another matter:
    it costs computing, and privacy. Without anybody to `ask` it is refused.
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
    """What an owner should know of a run before they agree."""
    algorithm = info.plan.get("algorithm", "fedavg")
    name = algorithm.get("name", "fedavg") if isinstance(algorithm, dict) else algorithm
    cost = "not private" if info.epsilon is None else f"epsilon {info.epsilon:.3g}"
    return f"({name}, {info.plan.get('rounds', '?')} rounds, {info.num_bytes:,} bytes, {cost})"
