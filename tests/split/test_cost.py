"""What is sent over a cut, and how long that takes, is what the formulas say."""

from __future__ import annotations

from typing import Any

import pytest
from split.models import images, plan_of

from atoll import run
from atoll.split.cost import batch_seconds, client_load
from atoll.split.cut import Cut, cut_model, places
from atoll.train.build import build_job
from atoll.train.job import Job

EPOCH = {"epochs": 1, "batch_size": 50, "lr": 0.01}
POOL_1, POOL_2, HIDDEN = "2", "5", "8"


def built(split: dict[str, Any], **fields: Any) -> tuple[Job, Cut]:
    plan = plan_of(split, **fields)
    job = build_job(plan)
    assert plan.split is not None
    return job, cut_model(job, plan.split)


@pytest.mark.parametrize(("cut", "megabytes"), [(POOL_1, 30.1), (POOL_2, 15.1), (HIDDEN, 2.5)])
def test_an_epoch_of_600_samples_of_cnn_mcmahan(cut: str, megabytes: float) -> None:
    job, found = built({"cut": cut}, model="cnn_mcmahan", data=images(num=600))
    assert round(found.cost(600, 10).epoch / 1e6, 1) == megabytes
    assert found.cost(600, 10).batch * 60 == found.cost(600, 10).epoch == 2 * 4 * found.width * 600
    assert round(2 * 4 * job.spec.num_params / 1e6, 1) == 13.3  # federated
    assert found.break_even == job.spec.num_params / found.width == found.num_params / found.width


@pytest.mark.parametrize("way", ["in_turn", "splitfed_v1", "splitfed_v2"])
@pytest.mark.parametrize("tail", [None, "7"])
def test_measured_bytes_are_those_of_the_formula(way: str, tail: str | None) -> None:
    """Within 2 % for every client and epoch; the clients' layers travel besides."""
    split = {"cut": POOL_1, "way": way, **({} if tail is None else {"tail": tail})}
    fields: dict[str, Any] = {"model": "cnn_mcmahan", "data": images(num=100), "local": EPOCH, "num_clients": 2}
    _, cut = built(split, **fields)
    row = run(plan_of(split, **fields)).history[-1]
    predicted = 2 * cut.cost(50, 50).epoch
    assert predicted <= row["cut_bytes"] < 1.02 * predicted
    weights = row["bytes_up"] + row["bytes_down"] - row["cut_bytes"]
    assert 2 * 2 * cut.client.num_bytes <= weights < 1.01 * 2 * 2 * cut.client.num_bytes + 2000


def test_measured_bytes_of_small_messages() -> None:
    """Of 200 values and ten samples, headers and labels are within 2 % too."""
    split = {"cut": "2"}
    _, cut = built(split, local={"epochs": 1, "batch_size": 10})
    row = run(plan_of(split, local={"epochs": 1, "batch_size": 10, "lr": 0.01})).history[-1]
    predicted = cut.cost(row["samples_trained"], 10).epoch
    assert predicted < row["cut_bytes"] < 1.02 * predicted


def test_codecs_shorten_what_crosses_the_cut() -> None:
    fields: dict[str, Any] = {"local": EPOCH}
    exact = run(plan_of({"cut": "2"}, **fields))
    coded = run(plan_of({"cut": "2", "codecs": [{"name": "quantise", "bits": 8}]}, **fields))
    assert coded.history[-1]["cut_bytes"] < 0.27 * exact.history[-1]["cut_bytes"]
    assert abs(coded.accuracy - exact.accuracy) < 0.05
    assert 0 < float((coded.params_D - exact.params_D).abs().max()) < 0.01


@pytest.mark.parametrize("tail", [None, "4"])
@pytest.mark.parametrize("in_flight", [1, 3, None])
def test_seconds_of_a_run_are_those_of_its_batches(in_flight: int | None, tail: str | None) -> None:
    split: dict[str, Any] = {"cut": "2", "micro_batches": 4, "latency": 0.02, "bandwidth": 1e6}
    split |= {} if in_flight is None else {"in_flight": in_flight}
    split |= {} if tail is None else {"tail": tail}
    plan = plan_of(split, local={"steps": 20, "batch_size": 40, "lr": 0.01})
    assert plan.split is not None
    _, cut = built(split)
    row = run(plan).history[-1]
    weights = 0.02 + 2 * cut.client.num_bytes / 1e6
    predicted = 20 * batch_seconds(cut, plan.split, 40) + weights
    assert row["simulated_seconds"] == pytest.approx(predicted, rel=0.03)
    trips = (2 if tail else 1) * (4 if in_flight == 1 else 2 if in_flight == 3 else 1)
    assert row["round_trips"] == 20 * trips + 1


def test_pieces_on_their_way_together_hide_the_latency() -> None:
    """At 20 ms a round trip, with the same bits: at least twice as fast."""
    split = {"cut": "2", "micro_batches": 8, "latency": 0.02, "bandwidth": 1e7}
    local = {"steps": 10, "batch_size": 64, "lr": 0.01}
    one, all_at_once = (run(plan_of({**split, **more}, local=local)) for more in ({"in_flight": 1}, {}))
    assert one.history[-1]["simulated_seconds"] > 2 * all_at_once.history[-1]["simulated_seconds"]
    assert one.history[-1]["bytes_up"] == all_at_once.history[-1]["bytes_up"]
    assert bool((one.params_D == all_at_once.params_D).all())


def test_clients_at_once_take_the_time_of_one_and_in_turn_that_of_all() -> None:
    split = {"cut": "2", "latency": 0.02, "bandwidth": 1e6}
    local = {"steps": 5, "batch_size": 20, "lr": 0.01}
    seconds = {
        way: run(plan_of({**split, "way": way}, num_clients=3, local=local)).history[-1]["simulated_seconds"]
        for way in ("in_turn", "splitfed_v1", "splitfed_v2")
    }
    assert seconds["splitfed_v1"] == pytest.approx(seconds["in_turn"] / 3, rel=1e-3)
    assert seconds["splitfed_v2"] == pytest.approx(seconds["splitfed_v1"], rel=1e-3)


def test_a_peer_hands_on_in_one_message() -> None:
    split = {"cut": "2", "way": "in_turn", "latency": 0.02, "bandwidth": 1e6}
    server, peer = (run(plan_of({**split, "handover": how}, num_clients=3)).history[-1] for how in ("server", "peer"))
    assert server["messages"] - peer["messages"] == 3
    assert server["bytes_up"] == peer["bytes_up"] and server["bytes_down"] == peer["bytes_down"]
    assert peer["simulated_seconds"] < server["simulated_seconds"]


def test_the_load_of_a_client() -> None:
    """Multiply-adds of the first convolution of cnn_mcmahan, by hand; the input needs no gradient."""
    fields: dict[str, Any] = {"model": "cnn_mcmahan", "data": images()}
    job, cut = built({"cut": POOL_1}, **fields)
    part, whole = client_load(job, cut, 10), client_load(job, None, 10)
    first = 28 * 28 * 32 * 25
    assert part.multiply_adds == 2 * first
    later = 14 * 14 * 64 * 32 * 25 + 3136 * 512 + 512 * 10
    assert whole.multiply_adds == 2 * first + 3 * later
    assert part.parameter_bytes == 4 * 832 and whole.parameter_bytes == 4 * 1_663_370
    assert part.activation_bytes == 10 * 4 * (2 * 28 * 28 * 32 + 14 * 14 * 32) < whole.activation_bytes


def test_the_places_of_a_model() -> None:
    job = build_job(plan_of(model="split.models:named"))
    assert {place.name: place.shape for place in places(job)} == {
        "conv1": (4, 8, 8),
        "pool1": (4, 4, 4),
        "block": (4, 4, 4),
        "fc": (16,),
    }
