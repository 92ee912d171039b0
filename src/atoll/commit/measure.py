"""What is measured after a round."""

from __future__ import annotations

from atoll.commit.run_state import RunState
from atoll.core.events import Evaluated
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.engine.base import Engine
from atoll.train.metrics import Metrics, spread


def measured(plan: Plan, engine: Engine, version: int, state: RunState, *, last: bool) -> Evaluated:
    """Measure what the plan asks for after this round; the last round is always measured.

    Where clients have models of their own, those are measured of the clients that have taken part, if they are here. A
    mechanism's noise does not cover what they keep, so that nothing is told of such models then.
    """
    ask, job = plan.evaluation, engine.job
    metrics: dict[str, Metrics] = {}
    confusion_KK = scores_C2 = None
    covered = not job.personal or job.mechanism is None or job.mechanism.test_noise
    asked = covered and (last or (ask.every > 0 and version % ask.every == 0))
    at_home = ask.clients_every > 0 and (last or version % ask.clients_every == 0)
    chosen = _chosen(plan, engine, state) if at_home or (asked and job.personal) else []
    own = {client: state.clients[client] for client in chosen} if job.personal else {}
    if asked:
        if own:
            metrics["test"], confusion_KK, models_C2 = engine.evaluate_own(state.params_D, own)
            metrics["models_test"] = spread(models_C2[:, 0], models_C2[:, 1])
        elif not job.personal:
            metrics["test"], confusion_KK = engine.evaluate(state.params_D)
    if at_home and chosen:
        scores_C2 = engine.evaluate_clients(state.params_D, chosen, own)
        metrics["clients_test"] = spread(scores_C2[:, 0], scores_C2[:, 1])
    return Evaluated(
        version=version,
        metrics=metrics,
        confusion_KK=confusion_KK,
        clients=tuple(chosen) if at_home else (),
        scores_C2=scores_C2,
    )


def _chosen(plan: Plan, engine: Engine, state: RunState) -> list[int]:
    """Return the clients to measure: all but those who joined to attack, or as many as the plan allows, by seed."""
    added = engine.job.federation.added  # the last clients
    have_models = (
        sorted(client for client in state.clients if client not in added) if engine.job.personal else range(added.start)
    )
    most = plan.evaluation.max_clients
    if len(have_models) <= most:
        return list(have_models)
    picked = generator(plan.seed, "evaluated clients").choice(len(have_models), size=most, replace=False)
    return [have_models[place] for place in sorted(picked.tolist())]
