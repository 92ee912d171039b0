"""What a client will not do, and that it says why: floors, devices, hours, other plans, other models, false ledgers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from network.scripted_server import ScriptedServer, serving

from atoll.core.downlink import Downlink
from atoll.core.errors import RunError
from atoll.core.messages import Broadcast, Payload
from atoll.core.plan import Plan
from atoll.core.transform import Encoding
from atoll.core.wire import pack
from atoll.ledger import chain
from atoll.network.client.agreeing import agree
from atoll.network.client.app import ClientApp
from atoll.network.client.client import Client, OwnerOutput
from atoll.network.client.connection import Connection
from atoll.network.client.home import EnrolledServer, Home, RunHome
from atoll.network.client.task import AgreedRun
from atoll.network.protocol.agreement import Floors, plan_for_clients
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import News, Order, Ref, RunInfo

PLAN = Plan(model={"name": "mlp_2nn", "hidden": 4}, local={"lr": 0.1, "batch_size": 8}, rounds=3)
PRIVATE = {"name": "local", "clip": 1.0, "sigma": 5.0, "delta": 1e-5}
X = np.random.default_rng(0).random((20, 5), dtype=np.float32)
Y = np.arange(20) % 2


def info_of(plan: Plan, /, **changes: Any) -> RunInfo:
    found = RunInfo("run", plan_for_clients(plan), "hash", 5, 5, 1000, 20, 1.0 if plan.privacy else None)
    return msgspec.structs.replace(found, **changes)


class One:
    """A server and one client of it."""

    def __init__(self, path: Path, plan: Plan = PLAN, floors: Floors | None = None, **app: Any) -> None:
        self.server = ScriptedServer(path)
        self.floors, self.plan = floors, plan
        self.app = ClientApp(**{"train_x": X, "train_y": Y, "num_classes": 2, "attributes": dict, **app})
        self.said: list[str] = []
        self.slept: list[float] = []
        self.path = path

    @contextmanager
    def joined(self, info: RunInfo | None = None) -> Iterator[Client]:
        self.begin(info or info_of(self.plan))
        with serving(self.server) as url:
            home = Home.make(self.path / "home")
            with Connection(url, home.key, keep_trying=False) as connection:
                client = connection.enrol(self.server.token(), "hospital")
            self.server.approve_all()
            home.enrolled(EnrolledServer(url, public_bytes(self.server.key), client, "hospital"))
            with Connection(url, home.key, say=self.said.append) as connection:
                output = OwnerOutput(lambda text: None, self.said.append)
                self.home = home
                yield Client(self.app, home, connection, output, self.floors, sleep=self.slept.append)

    def begin(self, info: RunInfo) -> None:
        """Begin a run, and its ledger, from a model of ones."""
        self.server.add_run(info, self.ones)

    @cached_property
    def ones(self) -> torch.Tensor:
        return torch.ones_like(self.work.layout.vector())

    def order(self, attempt: int = 0, version: int = 0, **changes: Any) -> None:
        """Ask the client for an update of a model of ones, of which a version is made as often as it takes."""
        ref = changes.pop("model", None) or self.server.put(pack(Payload(self.ones)))
        run = changes["run"] if changes.get("run") in self.server.versions else "run"
        while len(self.server.versions[run]) <= version:
            self.server.commit(run, self.ones)
        self.server.broadcast(run, ref.name)
        self.server.orders[0] = [msgspec.structs.replace(Order(run, attempt, version, ref), **changes)]

    @cached_property
    def work(self) -> AgreedRun:
        """What a willing client would make of the plan."""
        return agree(
            self.app,
            Floors(min_survivors=2),
            info_of(self.plan),
            0,
            RunHome(self.path / "willing"),
            bytes(32),
            name="c0",
        )

    def reasons(self) -> list[str]:
        return [reason for _, _, reason in self.server.refusals]


def test_what_a_version_is_made_of_is_what_the_plan_says(tmp_path: Path) -> None:
    one = One(tmp_path, floors=Floors(min_cohort=3))
    with one.joined(info_of(PLAN, cohort=5)) as client:  # whatever the server says: one report is enough for the plan
        one.order()
        client.step()
    assert one.reasons() == ["a version is made of 1 clients, this client asks for at least 3"]


FLOORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"min_cohort": 6}, {}, "at least 6"),
    ({"secagg": True}, {}, "secure aggregation"),
    ({"min_survivors": 4}, {"secagg": {}}, "a sum of 3 updates would be opened"),
    ({"min_survivors": 3}, {"secagg": {"min_survivors": 2}}, "a sum of 2 updates would be opened"),
    ({"max_epsilon": 1.0}, {}, "not private"),
    ({"algorithms": ["fedprox"]}, {}, "fedprox only"),
    ({"max_model_bytes": 50}, {}, "allows 50"),
    ({"max_model_bytes": 2000}, {"algorithm": {"name": "ifca", "clusters": 10}}, "allows 2,000"),
    ({"max_local_steps": 2}, {}, "a task takes 3 steps"),
    ({"max_local_steps": 3}, {"algorithm": {"name": "fine_tuning", "steps": 4}}, "takes 4 steps"),
    ({"max_epsilon": 100.0}, {"privacy": {**PRIVATE, "test_noise": True}}, "protects nobody"),
    ({"max_epsilon": 0.5}, {"privacy": PRIVATE}, "this client allows 0.5"),
]


@pytest.mark.parametrize(("floors", "settings", "says"), FLOORS, ids=[next(iter(each[0])) for each in FLOORS])
def test_a_plan_that_is_weaker_than_the_floors_is_refused(
    tmp_path: Path, floors: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    one = One(tmp_path, PLAN.replace(settings), Floors(**floors))
    with one.joined() as client:
        for attempt in range(3):
            one.order(attempt)
            client.step()
    assert len(one.server.refusals) == 3 and says in one.reasons()[0]
    assert sum(says in text for text in one.said) == 1  # its owner is told once
    assert not one.server.deliveries and one.home.runs() == []
    assert sum(path == "/v1/runs/run" for _, path, _ in one.server.log) == 1  # the plan was looked at once


def test_a_plan_that_meets_the_floors_is_worked_for(tmp_path: Path) -> None:
    floors = Floors(min_cohort=5, algorithms=["fedavg"], max_model_bytes=10_000, max_local_steps=3, hours=[0, 24])
    one = One(tmp_path, PLAN.replace({"policy.min_reports": 5}), floors)
    with one.joined() as client:
        one.order()
        client.step()
    assert not one.server.refusals and len(one.server.deliveries) == 1


def test_a_client_reckons_epsilon_itself(tmp_path: Path) -> None:
    one = One(tmp_path, PLAN.replace({"privacy": {**PRIVATE, "sigma": 0.5}}), Floors(max_epsilon=3.0))
    with one.joined(info_of(one.plan, epsilon=0.1)) as client:  # the server lies
        one.order()
        client.step()
    assert "may spend epsilon" in one.reasons()[0] and not one.server.deliveries


def test_a_client_stops_when_its_privacy_is_spent(tmp_path: Path) -> None:
    one = One(tmp_path, PLAN.replace({"privacy": PRIVATE, "rounds": 3}), Floors(max_epsilon=3.0))
    with one.joined() as client:
        for attempt in (0, 1, 60):  # more than the plan's rounds
            one.order(attempt)
            client.step()
    assert len(one.server.deliveries) == 2
    assert "would bring epsilon to" in one.reasons()[0]


def test_a_plan_cannot_fill_the_memory(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined(info_of(PLAN.replace({"model.hidden": 60_000}))) as client:  # 14 GB, said to be small
        one.order()
        client.step()
    assert "this client allows 4,294,967,296" in one.reasons()[0]


def test_many_models_cannot_fill_the_memory(tmp_path: Path) -> None:
    many = PLAN.replace({"model": {"name": "mlp_2nn", "hidden": 3000}, "algorithm": {"name": "ifca", "clusters": 1000}})
    one = One(tmp_path)
    with one.joined(info_of(many)) as client:  # 37 GB, said to be small
        one.order()
        client.step()
    assert "this client allows 4,294,967,296" in one.reasons()[0]


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"model": "os:system"}, "neither in the catalogue nor among"),
        ({"algorithm": "os:system"}, "no code is sent"),
        ({"model": {"name": "mlp_2nn", "hidden": "os:system"}}, "numbers and names"),
        ({"loss": "os:system"}, "no code is sent"),
        ({"data": "digits"}, "not for clients"),
        ({"models": ["os:getcwd"]}, "not for clients"),
        ({"public": "os:getcwd"}, "not for clients"),
        ({"loss": ["cross_entropy"]}, "must be a name"),
        ({"sampler": "os:getcwd", "privacy": PRIVATE}, "no code is sent"),
        ({"policy": {"name": "cohort", "size": "os:getcwd"}, "privacy": PRIVATE}, "numbers and names"),
        ({"unheard_of": 1}, "unknown key"),
        ({"secagg": {}, "sampler": "weighted"}, "could let one outweigh all others"),
        ({"privacy": PRIVATE, "algorithm": "qffl"}, "which is not protected"),
    ],
)
def test_code_and_other_strange_things_in_a_plan_are_refused(tmp_path: Path, plain: dict[str, Any], says: str) -> None:
    one = One(tmp_path)
    with one.joined(info_of(PLAN, plan={**plan_for_clients(PLAN), **plain})) as client:
        one.order()
        client.step()
    assert says in one.reasons()[0]


def test_what_only_the_server_runs_is_never_built_by_a_client(tmp_path: Path) -> None:
    own = {"aggregator": "os:nothing", "detection": "os:nothing", "sampler": {"name": "os:nothing", "a": ["os:b"]}}
    one = One(tmp_path)
    with one.joined(info_of(PLAN, plan={**plan_for_clients(PLAN), **own, "server": {"samples": 5}})) as client:
        one.order()
        client.step()
    assert not one.server.refusals and len(one.server.deliveries) == 1


def test_a_device_is_looked_at_again_before_work_begins(tmp_path: Path) -> None:
    battery = {"battery": 0.9}
    one = One(tmp_path, PLAN.replace({"eligibility.min_battery": 0.5}), attributes=lambda: dict(battery))
    with one.joined() as client:
        one.order()
        client.step()
        battery["battery"] = 0.1
        one.order(1)
        client.step()
    assert len(one.server.deliveries) == 1
    assert [poll.attributes for poll in one.server.polls] == [{"battery": 0.9}, {"battery": 0.1}]
    assert one.reasons() == ["this device may not be asked now: battery is 0.1, the rule asks for at least 0.5"]


def test_a_client_rests_outside_its_hours(tmp_path: Path) -> None:
    hour = time.localtime().tm_hour
    one = One(tmp_path, PLAN, Floors(hours=[(hour + 2) % 24, (hour + 3) % 24]))
    with one.joined() as client:
        client.step()
        client.step()
    assert not one.server.polls and one.slept == [60.0, 60.0]
    assert one.said == ["resting: outside the hours of the floors"]


def test_an_attempt_is_answered_once_and_attempts_count_on(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order(5)
        client.step()
        one.order(5, version=1)  # the same attempt on another version
        client.step()
        one.order(3)
        client.step()
        one.order(6)
        client.step()
    assert [attempt for _, attempt, _ in one.server.deliveries] == [5, 6]
    assert [("done on another model" in each, "is not after 5" in each) for each in one.reasons()] == [
        (True, False),
        (False, True),
    ]


def test_a_plan_that_changes_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.infos["run"] = info_of(PLAN.replace({"local.lr": 0.5}))
        client._agreed_runs.clear()  # as after a restart
        one.order(1)
        client.step()
    assert "another plan than it had before" in one.reasons()[0] and len(one.server.deliveries) == 1


def test_models_of_another_shape_or_of_rubbish_are_refused(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        size = one.work.layout.vector().numel()
        for attempt, data in enumerate(
            [
                pack(Payload(torch.ones(size + 1))),
                pack(Payload(torch.ones(size, dtype=torch.float64))),
                b"rubbish",
                pack(Payload(torch.ones(1 << 20))),
            ]
        ):
            one.order(attempt, attempt, model=one.server.put(data))
            client.step()
        one.order(9, 9, model=Ref("0" * 64, 1 << 40))
        client.step()
        one.order(10, 10)
        client.step()
    says = ["has (", "torch.float64", "not a payload", "are due in this run", "are due in this run"]
    assert len(one.reasons()) == 5
    assert all(word in reason for word, reason in zip(says, one.reasons(), strict=True))
    assert len(one.server.deliveries) == 1  # and it goes on


def test_training_that_fails_is_told(tmp_path: Path) -> None:
    one = One(tmp_path, PLAN.replace({"local.lr": 1e30}))
    with one.joined() as client:
        one.order()
        client.step()
    assert "NaN or Inf" in one.reasons()[0]


def test_a_run_that_is_no_name_ends_the_client(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order(run="../../etc")
        with pytest.raises(RunError, match="no name"):
            client.step()


LIES: dict[str, tuple[Callable[[One], None], str]] = {
    "changed": (lambda one: one.server.ledgers["run"].__setitem__(0, one.server.ledgers["run"][0][:-9]), "changed"),
    "another key": (lambda one: setattr(one.server, "ledgers", {"run": [forged()]}), "signature"),
    "another order": (lambda one: one.server.ledgers["run"].insert(0, two(one)[1]), "moved"),
    "another plan": (lambda one: one.begin(info_of(PLAN.replace({"seed": 5}))), "another plan"),
    "an update never sent": (lambda one: one.server.commit("run", one.ones, [(0, "0" * 64)]), "never sent"),
}


def forged() -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return chain.start({}, Ed25519PrivateKey.generate())[0]


def two(one: One) -> list[str]:
    one.server.commit("run", one.ones)
    return [*one.server.ledgers["run"][:-1], one.server.ledgers["run"].pop()]


@pytest.mark.parametrize("lie", LIES)
def test_a_false_ledger_ends_the_client(tmp_path: Path, lie: str) -> None:
    one, (tell, says) = One(tmp_path), LIES[lie]
    with one.joined() as client:
        tell(one)
        one.server.infos["run"] = info_of(PLAN)
        one.order()
        with pytest.raises(RunError, match=says):
            client.step()
    assert one.home.run("run").ledger_lines() == []


def test_a_ledger_that_is_rewritten_later_is_noticed(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.commit("run", one.ones, [(3, "f" * 64)])  # of somebody else: none of this client's business
        one.order(1, 1)
        client.step()
        assert len(one.home.run("run").ledger_lines()) == 4
        one.server.counted.clear()
        one.server.announced.clear()
        one.begin(info_of(PLAN))
        for _ in range(4):
            one.server.commit("run", one.ones)
        one.order(2, 4)
        with pytest.raises(RunError, match="does not follow"):
            client.step()
    assert len(one.home.run("run").ledger_lines()) == 4


class Sender:
    """The server's end of a downlink, as orders name what it sends."""

    def __init__(self, one: One, downlink: Downlink, layout: Broadcast) -> None:
        self.one, self.downlink, self.layout = one, downlink, layout
        self.known: torch.Tensor | None = None
        self.news: list[News] = []

    def order(self, version: int, vector_V: torch.Tensor, keep: int = 10) -> torch.Tensor:
        """Give the client an order for a version; what it should hear."""
        server, work = self.one.server, self.one.work
        encoding = Encoding(work.job.spec, version, np.random.default_rng(version))
        encoded, heard_V = None, vector_V
        if self.downlink.by_difference and self.known is not None:
            payload, _ = self.downlink.chain.encode(vector_V - self.known, {}, encoding)
            heard_V = self.known + self.downlink.chain.decode(payload)
            self.news = [*self.news, News(version, server.put(pack(payload)))][-keep:]
        elif not self.downlink.by_difference:
            payload, _ = self.downlink.chain.encode(vector_V, {}, encoding)
            heard_V, encoded = self.downlink.chain.decode(payload), server.put(pack(payload))
        self.known = heard_V
        ref = server.put(pack(Payload(heard_V)))
        while len(server.versions["run"]) <= version:
            server.commit("run", vector_V)
        server.broadcast("run", ref.name)
        server.orders[0] = [Order("run", version, version, ref, encoded=encoded, news=tuple(self.news))]
        return heard_V


@pytest.mark.parametrize(
    "downlink",
    [["half"], ["delta", {"name": "top_k", "fraction": 0.1}]],
    ids=["coded", "differences"],
)
def test_what_a_client_hears_is_what_the_server_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downlink: list[Any]
) -> None:
    one, heard = One(tmp_path, PLAN.replace({"downlink": downlink})), list[torch.Tensor]()
    train = AgreedRun.train
    monkeypatch.setattr(
        AgreedRun, "train", lambda self, order, sent: heard.append(sent.vector()) or train(self, order, sent)
    )
    with one.joined() as client:
        work = one.work
        sender, rng = Sender(one, work.job.downlink, work.layout), torch.Generator().manual_seed(0)
        said, models = list[torch.Tensor](), list[str]()
        for version in range(8):
            size = work.layout.vector().numel()
            kept = 2 if version < 7 else 1
            said.append(sender.order(version, torch.randn(size, generator=rng), kept))
            order = one.server.orders[0][0]
            models.append((order.encoded or order.model).name)
            if version not in (
                3,
                6,
            ):  # these are missed: the news of two versions lead on from the first, not the second
                client.step()
    turns = [0, 1, 2, 4, 5, 7]
    assert len(heard) == 6 and all(torch.equal(each, said[turn]) for each, turn in zip(heard, turns, strict=True))
    fetched = [turn for turn in turns if any(path.endswith(models[turn]) for _, path, _ in one.server.log)]
    assert fetched == ([0, 7] if work.job.downlink.by_difference else turns)
    assert not one.server.refusals
