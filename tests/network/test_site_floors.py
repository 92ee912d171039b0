"""What a site tells of an evaluation is its own choice: sums, counts with noise that its budget pays, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from network.federation import RUN, federation
from network.fork_server import ForkServer
from network.test_sites import ONLY, parts_at_home, sites_of

from atoll.commit.run_state import first_state
from atoll.core.errors import PlanError
from atoll.core.wire import unpack
from atoll.network.client.budget import Budget, Overspent
from atoll.network.client.evaluation import DELTA, REPLACED, noise_multiplier, tell
from atoll.network.client.home import RunHome
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol.agreement import Floors, evaluates_in_secret, refusal_reason
from atoll.network.protocol.messages import EvaluationOrder, Ref, RunInfo
from atoll.privacy.composing import as_event, spent_together
from atoll.train.build import build_job
from atoll.train.federation import build_federation

NOISED = Floors(evaluation="noised", evaluation_epsilon=0.5, max_epsilon=1.0)


def agreed_run(path: Path, floors: Floors, **changes: object) -> AgreedRun:
    """Client 0 of the run that only evaluates."""
    plan = ONLY.replace(changes)
    return AgreedRun(
        plan=plan, job=build_job(plan, build_federation(plan)), floors=floors, number=0, home=RunHome(path)
    )


def order_of(version: int) -> EvaluationOrder:
    """An order to measure a version."""
    return EvaluationOrder(RUN, version, Ref("0" * 64, 0))


def test_each_site_tells_what_its_floors_say(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        (network.root / "1.toml").write_text('evaluation = "noised"\nevaluation_epsilon = 0.5\nmax_epsilon = 0.6\n')
        (network.root / "2.toml").write_text('evaluation = "none"\n')
        network.serve("--clients", "3", "--once")
        network.enrol(3)
        network.join(0)
        for number in (1, 2):
            network.join(number, "--floors", f"{number}.toml")
        network.wait(60)
        job = build_job(ONLY, build_federation(ONLY))
        measures, parts = parts_at_home(ONLY, first_state(job, None).params_D)
        first, second = sites_of(network)["sites"]  # the third is not asked
        assert first["figures"] == pytest.approx(measures.finish(parts[0]))
        assert second["epsilon"] == 0.5 and "samples" not in second and "loss" not in second["figures"]
        assert "loss" not in sites_of(network)["pooled"] and "accuracy" in sites_of(network)["pooled"]
        [line] = [json.loads(line) for line in (network.root / "c1" / "budget.jsonl").read_text().splitlines()]
        epsilon, _ = spent_together([as_event(line["cost"]["event"])], DELTA)
        assert line["run"] == f"{RUN} (evaluations)" and 0.45 < epsilon <= 0.5
        _, told = RunHome(network.root / "c1" / "runs" / RUN).told_evaluation() or (0, None)
        assert told is not None
        noisy = unpack(told.sums, max_bytes=1 << 20).sides[0]
        assert noisy.keys() == {"confusion/confusion"}
        off = noisy["confusion/confusion"] - measures.condense(parts[1])["confusion/confusion"]
        assert bool((off == off.round()).all()) and 5 < float(off.std()) < 100
        assert not (network.root / "c2" / "budget.jsonl").exists()


def test_noise_is_as_wide_as_its_epsilon_asks_and_is_not_drawn_twice(tmp_path: Path) -> None:
    agreed = agreed_run(tmp_path / "run", NOISED, **{"evaluation.metrics": ["auroc", "accuracy", "perplexity"]})
    sums = agreed.measure(agreed.layout)
    budget = Budget(tmp_path / "budget.jsonl", "server", "run (evaluations)")
    told = tell(agreed, order_of(1), budget, lambda: sums)
    noisy = unpack(told.sums, max_bytes=1 << 22).sides[0]
    assert noisy.keys() == {"auroc/positive", "auroc/negative", "accuracy/sum", "accuracy/count"}
    off = torch.cat([(noisy[name] - sums[name]).flatten() for name in ("auroc/positive", "auroc/negative")])
    moves = (10 + 2) ** 0.5  # a count of each of ten classes, and two of the accuracy
    assert float(off.std()) == pytest.approx(noise_multiplier(0.5) * REPLACED * moves, rel=0.02)
    assert tell(agreed, order_of(1), budget, lambda: sums) == told
    with pytest.raises(WorkRefused, match="version 1 was evaluated after 0"):
        tell(agreed, order_of(0), budget, lambda: sums)
    assert tell(agreed, order_of(2), budget, lambda: sums) != told
    assert len((tmp_path / "budget.jsonl").read_text().splitlines()) == 2
    for version in range(3, 6):
        try:
            tell(agreed, order_of(version), budget, lambda: sums)
        except Overspent as error:
            assert "this client allows 1" in str(error)
            break
    else:
        pytest.fail("the budget was never spent")
    assert version > 3  # two of 0.5 compose to less than 1


def test_sums_without_a_bound_are_not_told_with_noise(tmp_path: Path) -> None:
    agreed = agreed_run(tmp_path / "run", NOISED, data="network.site_data:numbers")
    with pytest.raises(WorkRefused, match="is made of counts"):
        tell(agreed, order_of(1), Budget(tmp_path / "budget.jsonl", "", ""), lambda: agreed.measure(agreed.layout))
    assert not (tmp_path / "budget.jsonl").exists()


@pytest.mark.parametrize(
    ("floors", "changes", "why"),
    [
        (Floors(evaluation="none"), {}, "tells nothing"),
        (Floors(), {"evaluation.clients_every": 0}, "did not agree to evaluate"),
    ],
)
def test_a_server_that_asks_all_the_same_is_told_nothing(
    tmp_path: Path, floors: Floors, changes: dict[str, object], why: str
) -> None:
    agreed = agreed_run(tmp_path / "run", floors, **changes)
    with pytest.raises(WorkRefused, match=why):
        tell(agreed, order_of(1), Budget(tmp_path / "budget.jsonl", "", ""), lambda: agreed.measure(agreed.layout))


def test_noise_does_not_hide_what_an_own_model_tells(tmp_path: Path) -> None:
    """A client's own model is made of its samples without noise, so that another sample changes all counts."""
    agreed = agreed_run(tmp_path / "run", NOISED, algorithm={"name": "fine_tuning", "steps": 2})
    with pytest.raises(WorkRefused, match="the model is this client's own"):
        tell(agreed, order_of(1), Budget(tmp_path / "budget.jsonl", "", ""), lambda: agreed.measure(agreed.layout))
    assert not (tmp_path / "budget.jsonl").exists()


def test_a_model_that_gives_no_numbers_is_not_the_sites_offence(tmp_path: Path) -> None:
    agreed = agreed_run(tmp_path / "run", Floors())
    broken = agreed.layout._replace(params_D=torch.full_like(agreed.layout.params_D, torch.nan))
    with pytest.raises(WorkRefused, match="the model gives NaN"):
        agreed.measure(broken)


@pytest.mark.parametrize(
    ("floors", "rounds", "why"),
    [
        (Floors(evaluation="secret"), 0, None),
        (Floors(evaluation="secret", secagg=True), 0, None),
        (Floors(secagg=True), 0, "evaluations would be seen one by one"),
        (Floors(evaluation="secret", secagg=True), 3, "updates would be seen one by one"),
        (Floors(evaluation="secret", max_epsilon=1.0), 0, "the run is not private"),
        (Floors(evaluation="none", max_epsilon=1.0), 0, None),
    ],
)
def test_secret_sums_are_as_good_as_secure_updates_but_no_noise(floors: Floors, rounds: int, why: str | None) -> None:
    info = RunInfo(RUN, {}, "", 3, 3, 0, 1)
    reason = refusal_reason(floors, info, ONLY.replace({"rounds": rounds}), None, 0, number=0)
    assert reason is None if why is None else reason is not None and why in reason


def test_a_run_that_adds_updates_in_secret_adds_evaluations_so() -> None:
    secure = ONLY.replace({"rounds": 3, "secagg": {}})
    kinds = {kind: Floors(evaluation=kind) for kind in ("open", "secret", "none")} | {"noised": NOISED}
    assert {kind for kind, floors in kinds.items() if evaluates_in_secret(floors, secure)} == {"open", "secret"}
    assert {kind for kind, floors in kinds.items() if evaluates_in_secret(floors, ONLY)} == {"secret"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"evaluation": "hidden"}, '"secret" or "none", got .hidden.: choose'),
        ({"evaluation": "noised"}, "belong together"),
        ({"evaluation_epsilon": 1.0}, "belong together"),
        ({"evaluation": "noised", "evaluation_epsilon": 0.0}, r"in \(0, 20\]"),
    ],
)
def test_floors_that_make_no_sense_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Floors.read(settings)
