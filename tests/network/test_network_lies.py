"""A real server among enrolled clients that lie: about lengths, weights, samples and losses, or that refuse to work.

Shapes: D parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from network.federation import RUN, Federation, federation, until
from network.fork_server import ForkServer
from network.raw_client import NUM_PARAMS, TASK, RawClient, RawResponse, approved_raw_clients, constant_update, packed

from atoll import Plan
from atoll.network.protocol.messages import Order, Refusal
from atoll.privacy.ledger import Ledger

MANY = Plan(rounds=1_000_000, policy={"name": "cohort"}, evaluation={"every": 0})
"""Everybody is asked, and a version is made when all have answered or failed."""
HUGE = 3.4e38


@pytest.fixture
def made(processes: ForkServer, certs: Path, tmp_path: Path) -> Iterator[Federation]:
    """A federation with an endless run of everybody."""
    with federation(tmp_path / "f", processes, certs, MANY) as found:
        yield found


def joined(made: Federation, num: int, *options: str, num_samples: tuple[int, ...] = ()) -> list[RawClient]:
    """Clients of a server that has just been started, which know how many samples each of them claims."""
    raw_clients = approved_raw_clients(made, num)
    made.serve("--clients", str(num), *options)
    for number, raw_client in enumerate(raw_clients):
        raw_client.begin()
        raw_client.orders(0, num_samples[number] if num_samples else 10)
    return raw_clients


def refuse(raw_client: RawClient, order: Order, *, whole_run: bool = False) -> None:
    path = TASK.format(run=RUN, attempt=order.attempt)
    assert raw_client.ask("POST", f"{path}/refuse", Refusal("not today", whole_run=whole_run)).status == 200


def offences(made: Federation) -> list[int]:
    return [row["offences"] for row in made.operate("GET", "/clients")["clients"]]


def test_an_update_that_is_too_long_is_left_out_and_the_run_goes_on(made: Federation) -> None:
    first, second, liar = joined(made, 3)
    before_D = first.model(first.order())
    lengths = (HUGE, 1e30, 1e9 / NUM_PARAMS**0.5 * 1.01)
    for number, value in enumerate(lengths):
        said = liar.deliver(liar.order(), constant_update(value))
        assert (said.status, "server.max_norm is 1e+09" in said.error) == (422, True), said
        for raw_client in (first, second):
            assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
        found_D = first.model(first.order())
        torch.testing.assert_close(found_D, before_D + 1.0 + number)
    assert [row["status"] for row in made.operate("GET", "/clients")["clients"]] == ["approved"] * 2 + ["quarantined"]
    commits = made.commits()
    assert [[each["client"] for each in commit["rejected"]] for commit in commits] == [[2]] * 3
    assert made.audited().rejected == 3


def test_who_makes_a_version_overflow_is_found_named_and_not_asked_again(made: Federation) -> None:
    made.write(MANY.replace({"server.max_norm": 1e300}))  # so that the length alone is no reason to reject
    *honest, liar = joined(made, 4)
    before_D = honest[0].model(honest[0].order())
    assert liar.deliver(liar.order(), constant_update(HUGE)).status == 200
    for raw_client in honest:
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
    order = honest[0].order()
    assert order.version == 1
    torch.testing.assert_close(honest[0].model(order), before_D + 1.0)
    (commit,) = made.commits()
    assert [each["client"] for each in commit["cohort"]] == [0, 1, 2]
    assert commit["rejected"] == [{"client": 3, "attempt": 0, "why": "made the version overflow"}]
    assert made.rows()[0]["overflowed"] == [3]
    assert offences(made) == [0, 0, 0, 1]
    assert '"why": "made the version overflow: quarantined in this run"' in (made.root / "server.out").read_text()
    assert not liar.orders(0)
    assert made.server is not None
    made.server.kill()
    made.serve("--clients", "4")
    for raw_client in honest:
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
    assert honest[0].order().version == 2
    assert not liar.orders(0)
    made.audited()


def test_a_sum_of_updates_that_overflows_is_not_anybodys_fault_alone(made: Federation) -> None:
    """Updates that are all as long as each other make nobody stand out: the offence is nobody's."""
    made.write(MANY.replace({"server.max_norm": 1e300}))
    raw_clients = joined(made, 3)
    for raw_client in raw_clients:
        assert raw_client.deliver(raw_client.order(), constant_update(2e38)).status == 200
    until(lambda: made.status()["status"] != "running", 60)
    assert "diverged" in made.status()["status"]
    assert offences(made) == [0, 0, 0]


def delivered(raw_client: RawClient, value: float, weight: float, num_samples: int, claims: int) -> RawResponse:
    return raw_client.deliver(
        raw_client.order(num_samples=claims), constant_update(value), weight=weight, num_samples=num_samples
    )


def test_a_weight_is_what_the_agreed_samples_weigh(made: Federation) -> None:
    first, second, liar = joined(made, 3, num_samples=(600, 600, 600))
    before_D = first.model(first.order(num_samples=600))
    for raw_client in (first, second):
        assert delivered(raw_client, 1.0, 600.0, 600, 600).status == 200
    assert delivered(liar, -1.0, 1e7, 10_000_000, 10_000_000).status == 200  # cut to the 600 that it said at first
    found_D = first.model(first.order(num_samples=600))
    torch.testing.assert_close(found_D, before_D + 1 / 3)
    assert {each["client"]: each["weight"] for each in made.commits()[0]["cohort"]} == {0: 600.0, 1: 600.0, 2: 1e7}
    made.audited()


def test_a_weight_that_samples_do_not_have_is_an_offence(made: Federation) -> None:
    wrong = (1e300, 601.0, 0.0, -1.0, 1e-300)
    honest, *liars = joined(made, 1 + len(wrong), num_samples=(600,) * 6)
    before_D = honest.model(honest.order(num_samples=600))
    for liar, weight in zip(liars, wrong, strict=True):
        said = delivered(liar, -1.0, weight, 600, 600)
        assert (said.status, "weight" in said.error) == (422, True), said
    assert delivered(honest, 1.0, 600.0, 600, 600).status == 200
    torch.testing.assert_close(honest.model(honest.order(num_samples=600)), before_D + 1.0)
    assert offences(made) == [0, 1, 1, 1, 1, 1]


def test_a_claim_counts_little_more_than_the_median_until_the_operator_agrees(made: Federation) -> None:
    sizes = (600, 500, 400, 10_000_000)
    raw_clients = joined(made, 4, num_samples=sizes)
    before_D = raw_clients[0].model(raw_clients[0].order(num_samples=600))
    for raw_client, size in zip(raw_clients, sizes, strict=True):
        value = -1.0 if size > 600 else 1.0
        assert delivered(raw_client, value, float(size), size, size).status == 200
    found_D = raw_clients[0].model(raw_clients[0].order(num_samples=600))
    torch.testing.assert_close(found_D, before_D + (1500 - 1200) / (1500 + 1200))  # twice the (upper) median of 600
    rows = made.operate("GET", "/clients")["clients"]
    assert [(row["samples"], row["agreed"]) for row in rows] == [(600, None), (500, None), (400, None), (10**7, None)]
    made.operate("POST", "/clients/approve", {"names": ["light 3"], "samples": 5000})
    made.operate("POST", "/runs", {"run": "next", "plan": MANY.to_dict()})

    def of_next(raw_client: RawClient, size: int) -> Order:
        return until(lambda: [each for each in raw_client.orders(5, size) if each.run == "next"], 20)[0]

    before_D = raw_clients[0].model(of_next(raw_clients[0], 600))
    for raw_client, size in zip(raw_clients, sizes, strict=True):
        value = 1.0 if size > 600 else 0.0
        said = raw_client.deliver(
            of_next(raw_client, size), constant_update(value), weight=float(size), num_samples=size
        )
        assert said.status == 200
    order = of_next(raw_clients[0], 600)
    assert order.version == 1
    torch.testing.assert_close(raw_clients[0].model(order), before_D + 5000 / 6500)


@pytest.mark.parametrize("loss", [1.7e308, None, pytest.param(-1e31, marks=pytest.mark.slow)])
def test_a_loss_that_no_sum_can_hold_is_no_loss(made: Federation, loss: float | None) -> None:
    honest, liar = joined(made, 2)
    assert honest.deliver(honest.order(), constant_update(1.0)).status == 200
    said = liar.deliver(liar.order(), constant_update(1.0), loss=loss)
    assert (said.status, "the training loss is not a number" in said.error) == (422, True)
    honest.order()
    assert made.rows()[0]["train_loss"] == 1.0


EXTRAS = {
    "fednova": ((0.0, 1e12), (0.0, -1e12), (0.0, 1e17)),
    "qffl": ((1.0, 0.0), (1.0, -5.0), (1.0, 1e-30)),
    "fedexp": ((1.0, 1e12), (1.0, -1.0), (0.0, 1e17)),
}


@pytest.mark.parametrize("algorithm", [pytest.param(n, marks=() if n == "qffl" else pytest.mark.slow) for n in EXTRAS])
def test_extra_numbers_that_no_client_could_have_made_are_refused(made: Federation, algorithm: str) -> None:
    """The server's step multiplies or divides by them: one of them would be enough to blow it up."""
    name, good = {"fednova": ("steps", 1.0), "qffl": ("scale", 1e4), "fedexp": ("square", 650.0)}[algorithm]
    made.write(MANY.replace({"algorithm": algorithm}))
    honest, liar = joined(made, 2)
    for value, extra in EXTRAS[algorithm]:
        bad = packed(torch.full((NUM_PARAMS,), value), {name: torch.tensor([extra])})
        said = liar.deliver(liar.order(), bad)
        assert (said.status, "its extra vectors" in said.error) == (422, True), (extra, said)
        fine = packed(torch.full((NUM_PARAMS,), 1.0), {name: torch.tensor([good])})
        assert honest.deliver(honest.order(), fine).status == 200
    assert bool(honest.model(honest.order()).abs().max() < 100)


def test_who_refuses_is_left_out_for_a_while_and_it_is_an_offence(made: Federation) -> None:
    *honest, idler = joined(made, 3)
    refuse(idler, idler.order())
    for turn in range(3):
        for raw_client in honest:
            assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
        assert honest[0].order().version == turn + 1
        assert not idler.orders(0)
    assert offences(made) == [0, 0, 1]
    refused = {"client": 2, "attempt": 0, "why": "refused: not today"}
    assert [commit["rejected"] for commit in made.commits()] == [[refused], [], []]
    assert made.server is not None
    made.server.kill()
    made.serve("--clients", "3")
    for raw_client in honest:
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
    assert honest[0].order().version == 4
    assert not idler.orders(0) and offences(made) == [0, 0, 1]
    made.operate("POST", "/clients/approve", {"names": ["light 2"]})  # the operator forgives
    for raw_client in honest:
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
    assert idler.order().version == 5 and offences(made) == [0, 0, 0]


def test_who_wants_no_part_in_a_run_is_never_asked_again_and_not_blamed(made: Federation) -> None:
    *honest, other = joined(made, 3)
    refuse(other, other.order(), whole_run=True)
    for _ in range(2):
        for raw_client in honest:
            assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
        honest[0].order()
    assert offences(made) == [0, 0, 0]
    refuse(honest[1], honest[1].order(), whole_run=True)
    assert honest[0].deliver(honest[0].order(), constant_update(1.0)).status == 200
    refuse(honest[0], honest[0].order(), whole_run=True)
    until(lambda: '"event": "waiting"' in (made.root / "server.out").read_text(), 20)
    assert not other.orders(0)


def test_what_nobody_can_do_is_nobodys_offence(made: Federation) -> None:
    raw_clients = joined(made, 3)
    for raw_client in raw_clients:
        refuse(raw_client, raw_client.order())
    until(lambda: len(made.lines()) == 3, 20)  # the beginning, what was sent, and what came of it
    assert [each["client"] for each in json.loads(made.lines()[2])["body"]["rejected"]] == [0, 1, 2]
    assert offences(made) == [0, 0, 0]


def test_one_who_refuses_spends_at_most_one_attempt_of_everybodys_privacy(made: Federation) -> None:
    rounds = 6
    private = {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-4}
    plan = MANY.replace({"rounds": rounds, "privacy": private, "policy": {"size": 2, "min_reports": 2}})
    made.write(plan.replace({"local.batch_size": 5}))
    raw_clients = joined(made, 3)
    idler = raw_clients[2]
    for _ in range(1000):
        if made.status()["status"] != "running":
            break
        for raw_client in raw_clients:
            for order in raw_client.orders(0.05):
                if raw_client is idler:
                    refuse(raw_client, order)
                else:
                    assert raw_client.deliver(order, constant_update(0.01), loss=0.0).status in (200, 410)
    assert made.status()["status"] == "all rounds done"
    ledger = Ledger.read(made.directory() / "privacy.ledger", plan.replace({"local.batch_size": 5}).identity())
    assert ledger.num_charged in (rounds, rounds + 1)
    assert made.audited().abandoned <= 1


def test_a_client_whose_floors_refuse_the_plan_is_asked_once(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    plan = Plan(rounds=4, partition={"name": "iid", "num_clients": 3}, evaluation={"every": 0})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve("--clients", "3", "--once")
        made.enrol(3)
        (made.root / "floors.toml").write_text("min_cohort = 99\n")
        for number in range(3):
            made.join(number, *(["--floors", str(made.root / "floors.toml")] if number == 2 else []))
        assert made.wait_for(RUN, 60) == "all rounds done"
        assert offences(made) == [0, 0, 0]
        rejected = [each for commit in made.commits() for each in commit["rejected"]]
        assert [each["client"] for each in rejected] == [2]
        assert "this client asks for at least 99" in rejected[0]["why"]
        made.wait(60)
