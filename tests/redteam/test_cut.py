"""The red team at a cut: what probes get of split plans, beside floors and the truth, and what becomes of claims."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from report.test_personal_page import Strict
from torch import Tensor

from atoll import Plan
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.probe import GOALS, SAMPLE_LABELS, SAMPLES, CutSight, Guess, Probe, Samples, Work
from atoll.probes.gradient_direction import cosines
from atoll.redteam.cut_judge import correlation_of, judge_cut
from atoll.redteam.run import red_team
from atoll.report.redteam import BROKEN, FAILED, HOLDS, NOTHING, OPEN, SOME, RedTeam
from atoll.report.redteam_page import redteam_page
from atoll.simulation.cut_seat import CutWatched, watch_cut
from atoll.split.shield import Shield

BASE: dict[str, Any] = {
    "model": {"name": "mlp_2nn", "hidden": 32},
    "partition": {"num_clients": 12, "samples_per_client": 40},
    "policy": {"size": 3},
    "local": {"batch_size": 10, "lr": 0.1},
    "rounds": 2,
    "engine": "inline",
}
OPEN_CUT: dict[str, Any] = {"split": {"cut": "2"}}
U_SHAPE: dict[str, Any] = {"split": {"cut": "2", "tail": "5"}}
CLAIM = {"name": "activations", "clip": 1.0, "sigma": 4.0, "delta": 1e-5}
PRIVATE: dict[str, Any] = {"split": {"cut": "2", "tail": "5", "frozen": True}, "privacy": CLAIM, "local.lr": 0.01}
NOISY = {"name": "noise", "clip": 1.0, "sigma": 1.0}
CREDIT: dict[str, Any] = {
    "data": "german_credit",
    "partition": {"num_clients": 8},
    "local": {"batch_size": 25, "lr": 0.1},
    "split": {"cut": "2", "tail": "5"},
}


def plan_of(changes: dict[str, Any]) -> Plan:
    dotted = {key: value for key, value in changes.items() if "." in key}
    return Plan(**{**BASE, **{key: value for key, value in changes.items() if "." not in key}}).replace(dotted)


def seen(changes: dict[str, Any], rounds: int = 1) -> CutWatched:
    """Watch the last of some rounds."""
    return watch_cut(plan_of(changes), rounds, since=rounds - 1)


def attacked(name: str, watched: CutWatched) -> dict[str, float]:
    """Return the figures of a probe."""
    probe: Probe = Part(name).build("probes")
    assert probe.at_cut is not None and probe.why_not_at_cut(watched.known, watched.sights) is None
    guesses = probe.at_cut(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: False))
    judged = judge_cut(probe.goal, watched, guesses)
    assert judged is not None
    return {**judged.figures, "level": {NOTHING: 0, SOME: 1, OPEN: 2}[judged.level]}


def page_of(changes: dict[str, Any], **settings: Any) -> RedTeam:
    """Attack by a clock that goes on whenever it is looked at, whatever the speed of the machine."""
    ticks = itertools.count()
    return red_team(plan_of(changes), rounds=1, seconds=9000.0, now=lambda: float(next(ticks)), **settings)


KINDS = {"open": OPEN_CUT, "labels kept": U_SHAPE, "private": PRIVATE}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "private")) for kind in KINDS])
def test_a_plan_ends_with_a_page(kind: str) -> None:
    some = ["decoder", "tail_replay"] if kind == "private" else []
    found = page_of(KINDS[kind], probes=some)
    page = redteam_page(found)
    assert Strict(page).scripts == 0 and "Which setting to change" in page and FAILED not in page
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["sees"] == found.sees
    assert {claim.verdict for claim in found.claims} <= {HOLDS}, found.claims
    assert all(change.findings or change.why_not for change in found.changes) and found.changes
    assert not [change.why_not for change in found.changes if change.why_not]
    tried = {each.probe for each in found.findings if each.figures}
    assert "decoder" in tried and ("told_labels" in tried) == (kind == "open") != ("tail_replay" in tried)
    assert all(each.goal in GOALS for each in found.findings)
    assert ("epsilon" in str(found.claims)) == (kind == "private")


def test_a_decoder_beats_its_floor_and_noise_brings_it_down() -> None:
    plain, noisy = (seen({"split": {"cut": "2", "defences": each}}) for each in ([], [NOISY]))
    open_figures, noisy_figures = attacked("decoder", plain), attacked("decoder", noisy)
    assert open_figures["mean PSNR in dB"] > open_figures["mean dB of the mean one"] + 5
    assert (
        noisy_figures["mean PSNR in dB"] < noisy_figures["mean dB of the mean one"] + 1 and noisy_figures["level"] == 0
    )
    assert noisy_figures["bias-corrected square"] < 0.6 * open_figures["bias-corrected square"]


def test_the_judge_gives_the_truth_everything_and_the_mean_nothing() -> None:
    watched = seen(OPEN_CUT)
    own = watched.known.elsewhere.x
    truth = [Guess(row=0, x=watched.truths[0].x)]
    mean = [Guess(row=0, x=own.mean(0).expand_as(watched.truths[0].x))]
    best, none = judge_cut(SAMPLES, watched, truth), judge_cut(SAMPLES, watched, mean)
    assert best is not None and none is not None and (best.level, none.level) == (OPEN, NOTHING)
    assert none.figures["mean PSNR in dB"] == pytest.approx(none.figures["mean dB of the mean one"])
    right = judge_cut(SAMPLE_LABELS, watched, [Guess(row=0, y=watched.truths[0].y)])
    assert right is not None and right.level == OPEN and right.figures["share of labels right"] == 1.0
    shifted = judge_cut(SAMPLE_LABELS, watched, [Guess(row=0, y=(watched.truths[0].y + 1) % 10)])
    assert shifted is not None and shifted.level == NOTHING


def test_sights_are_in_the_order_of_their_truth() -> None:
    """The activations of the first batch are those of the first layers on the samples that the judge has."""
    watched = seen(OPEN_CUT)
    sight, true = watched.sights[0], watched.truths[0]
    first = sight.batch_N == 0
    assert sight.client_M is not None and len(sight.activations_N) == len(true.x) == 40
    with torch.no_grad():
        expected = watched.known.client(sight.client_M)["head"](true.x[first])
    torch.testing.assert_close(sight.activations_N[first], expected)
    assert sight.labels_N is not None and torch.equal(sight.labels_N, true.y)


def test_labels_of_two_classes_are_read_from_gradients_and_noise_hides_them() -> None:
    plain = seen(CREDIT)
    for name in ("gradient_direction", "tail_replay"):
        assert attacked(name, plain)["AUC"] > 0.95
    assert attacked("tail_replay", plain)["share of labels right"] == 1.0
    assert attacked("gradient_norm", seen(CREDIT, 6))["AUC"] > 0.6  # of a model that is sure of the usual class
    loud = {"name": "isotropic", "scale": 50.0, "test_noise": True}
    noisy = seen({**CREDIT, "split": {**CREDIT["split"], "defences": [loud]}})
    for name in ("gradient_norm", "gradient_direction"):
        assert abs(attacked(name, noisy)["AUC"] - 0.5) < 0.1 and attacked(name, noisy)["level"] == 0


def test_a_table_is_judged_by_its_columns() -> None:
    figures = attacked("decoder", seen(CREDIT))
    assert figures["share of values right"] > figures["share right by the usual values"] + 0.1


def test_ten_classes_are_read_by_a_copy_of_the_tail() -> None:
    assert attacked("tail_replay", seen(U_SHAPE))["share of labels right"] > 0.99


def test_layers_that_the_server_does_not_get_are_not_known() -> None:
    watched = seen({"split": {"cut": "2", "way": "in_turn", "handover": "peer"}})
    probe: Probe = Part("decoder").build("probes")
    why = probe.why_not_at_cut(watched.known, watched.sights)
    assert why is not None and "does not get them" in why
    assert attacked("decoder_blind", watched)["mean PSNR in dB"] > 0


@pytest.mark.parametrize("change", ["half the noise", "the same noise"])
def test_a_claim_of_noise_that_does_not_hold_is_broken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shield.sent

    def half(self: Shield, activations_B: Tensor, place: Any) -> Tensor:
        return (whole(self, activations_B, place) + activations_B) / 2

    def same(self: Shield, activations_B: Tensor, place: Any) -> Tensor:
        noise = torch.randn(activations_B.shape, generator=torch.Generator().manual_seed(0))
        return activations_B + 4.0 * noise * bool(self.defences)

    monkeypatch.setattr(Shield, "sent", half if change == "half the noise" else same)
    verdicts = {claim.claim: claim.verdict for claim in page_of(PRIVATE, probes=["told_labels"]).claims}
    told = "epsilon" if change == "half the noise" else "never used twice"
    assert [verdict for claim, verdict in verdicts.items() if told in claim] == [BROKEN], verdicts


def test_probes_of_updates_and_of_cuts_are_kept_apart() -> None:
    with pytest.raises(PlanError, match="linear_leak cannot look at activations"):
        page_of(OPEN_CUT, probes=["linear_leak"])
    with pytest.raises(PlanError, match="decoder cannot look at updates"):
        red_team(Plan(**BASE), probes=["decoder"])


def test_a_distance_correlation_is_of_different_samples() -> None:
    """A sample that was sent in every pass counts once."""
    watched = seen({**OPEN_CUT, "local": {"batch_size": 10, "epochs": 3, "lr": 0.01}})
    found = correlation_of(watched)
    assert found is not None and found.num_rows <= 40 < len(watched.truths[0].x)


def test_directions_part_a_batch_into_few_and_many() -> None:
    base = torch.tensor([[1.0, 0.2], [0.9, 0.3], [-1.0, -0.2]]).double()
    assert (cosines(base) > 0).tolist() == [False, False, True]


def test_a_sight_may_lack_everything_but_activations() -> None:
    sight = CutSight(0, 0, None, torch.zeros(0), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    watched = seen(OPEN_CUT)._replace(sights=[sight], truths=[Samples(torch.zeros(2, 64), torch.zeros(2))])
    for name in ("gradient_norm", "gradient_direction", "tail_replay", "told_labels", "decoder"):
        probe: Probe = Part(name).build("probes")
        assert probe.why_not_at_cut(watched.known, watched.sights)
