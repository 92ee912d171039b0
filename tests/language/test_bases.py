"""Bases in a real federation: a client reads those of its owner alone, checks their hash, and knows sizes before."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from network.apps import dealt

import atoll
from atoll.cli.join import _app
from atoll.core.errors import AtollError, DataError, PlanError
from atoll.core.plan import Plan
from atoll.models.hf_files import base_hash
from atoll.network.client.agreeing import _model_bytes, agree
from atoll.network.client.app import ClientApp
from atoll.network.client.home import RunHome
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol.agreement import Floors, plan_for_clients, read_plan
from atoll.network.protocol.messages import RunInfo
from atoll.network.server.parts import dry_run_for
from atoll.train.build import build_job

transformers = pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")

NAME = "letters"


class Listener:
    """Notes what Python opens, lists or connects to while it is asked to; hooks cannot be taken away."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.events is not None and (event.startswith("socket.") or event in ("open", "os.listdir", "os.scandir")):
            self.events.append((event, str(args[0])))

    @contextmanager
    def listening(self) -> Iterator[list[tuple[str, str]]]:
        self.events = events = []
        try:
            yield events
        finally:
            self.events = None


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener()


@pytest.fixture
def plan(llm_plan: Plan, base: Path, tmp_path: Path) -> Plan:
    """What the server has: the base in a directory of its own."""
    shutil.copytree(base, tmp_path / "server" / NAME)
    return llm_plan.replace({"model.path": str(tmp_path / "server" / NAME)})


@pytest.fixture
def app(plan: Plan, base: Path, tmp_path: Path) -> ClientApp:
    """What a client has: its rows, and a copy of the base elsewhere."""
    shutil.copytree(base, tmp_path / "mine")
    return replace(dealt(plan, 0), bases={NAME: tmp_path / "mine"})


def agreed(app: ClientApp, plain: dict[str, Any], path: Path, floors: Floors | None = None) -> AgreedRun:
    info = RunInfo("run", plain, "hash", 8, 1, 1, 20)
    return agree(app, floors or Floors(), info, 0, RunHome(path / "home"), bytes(32), name="c0")


def test_clients_are_told_a_name_and_a_hash(plan: Plan, tmp_path: Path) -> None:
    told = plan_for_clients(plan)
    assert told["model"] == {
        "name": "hf_causal",
        "base": NAME,
        "sha256": base_hash(plan.model.options["path"]),
        "rank": 4,
        "alpha": 8.0,
    }
    assert str(tmp_path) not in str(told)
    with pytest.raises(PlanError, match=r"model\.path is missing"):
        dry_run_for(plan.replace({"model.path": None}), 3)
    assert plan_for_clients(plan.replace({"model.sha256": "f" * 64}))["model"]["sha256"] == "f" * 64


def test_a_client_builds_its_own_base(plan: Plan, app: ClientApp, tmp_path: Path, listener: Listener) -> None:
    with listener.listening() as events:
        run = agreed(app, plan_for_clients(plan), tmp_path)
    job = build_job(plan)
    assert run.plan.model.options["path"] == str(tmp_path / "mine")
    assert torch.equal(run.job.first_D, job.first_D)
    named = dict(job.model.named_parameters())
    assert all(torch.equal(each, named[name]) for name, each in run.job.model.named_parameters())
    read = [path for _, path in events]
    assert any(path.startswith(str(tmp_path / "mine")) and path.endswith(".safetensors") for path in read)


SOURCES: dict[str, dict[str, Any]] = {
    "path": {"path": "OUTSIDE"},
    "path-beside-base": {"base": NAME, "path": "OUTSIDE"},
    "path-as-base": {"base": "OUTSIDE"},
    "dots": {"base": "../server/letters"},
    "hub": {"base": "hf-internal-testing/tiny-random-LlamaForCausalLM"},
    "another": {"base": "unknown"},
    "no-name": {},
    "a-number": {"base": 3},
    "a-list": {"base": [NAME]},
    "no-hash": {"base": NAME, "sha256": ""},
    "no-text-as-hash": {"base": NAME, "sha256": 64},
}


@pytest.mark.parametrize("source", list(SOURCES))
def test_a_server_does_not_choose_what_is_read(
    source: str, plan: Plan, app: ClientApp, tmp_path: Path, listener: Listener
) -> None:
    outside = str(tmp_path / "server" / NAME)
    model = {"name": "hf_causal", "sha256": base_hash(outside), "rank": 4}
    model |= {key: outside if value == "OUTSIDE" else value for key, value in SOURCES[source].items()}
    plain = {**plan_for_clients(plan), "model": model}
    with listener.listening() as events, pytest.raises(PlanError) as error:
        agreed(app, plain, tmp_path)
    inside = [str(tmp_path / "home"), str(Path(atoll.__file__).parent), sys.prefix, sys.base_prefix]
    assert [each for each in events if not any(each[1].startswith(folder) for folder in inside)] == []
    words = {
        "path": "gives a path",
        "path-beside-base": "gives a path",
        "no-hash": "no hash",
        "no-text-as-hash": "no hash",
    }
    assert words.get(source, "not among this client's own (it has letters)") in str(error.value)
    assert str(tmp_path / "mine") not in str(error.value)


def test_another_base_is_refused_with_both_hashes(plan: Plan, app: ClientApp, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "mine")
    hashes = base_hash(str(tmp_path / "mine")), base_hash(plan.model.options["path"])
    with pytest.raises(PlanError) as error:
        agreed(app, plan_for_clients(plan), tmp_path)
    assert hashes[0] != hashes[1] and all(each in str(error.value) for each in hashes)
    assert str(tmp_path) not in str(error.value)  # the server is told the reason
    with pytest.raises(PlanError, match="their hash is"):
        agreed(app, plan_for_clients(plan.replace({"model.sha256": "0" * 64})), tmp_path)


@pytest.mark.parametrize("algorithm", ["fedit", "ffa_lora", "flora", "fedex_lora"])
def test_sizes_are_of_what_travels_and_no_weights_are_read(
    algorithm: str, plan: Plan, app: ClientApp, listener: Listener
) -> None:
    plan = plan.replace({"algorithm": algorithm})
    own = read_plan(plan_for_clients(plan), app.own_parts)
    with listener.listening() as events:
        size = _model_bytes(own, app.dataset())
    assert not [path for _, path in events if path.endswith(".safetensors")]
    job = build_job(plan)
    frozen = 2 * 2 * 4 * 16 * 4 if algorithm == "ffa_lora" else 0  # its factors A are drawn by all
    assert size == 4 * job.spec.num_params + frozen
    assert (job.spec.num_held > 0) == (algorithm in ("flora", "fedex_lora"))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 10**9}, "model.rank"),
    "rank-in-range": ({"rank": 2**16}, "this client allows 100,000"),
    "everything": (
        {"rank": 2048, "targets": [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]},
        "this client allows 100,000",
    ),
    "embedding": ({"rank": 4096, "targets": ["embed_tokens", "lm_head"]}, "this client allows 100,000"),
    "personal": ({"personal_rank": 2**16}, "this client allows 100,000"),
    "no-layer": ({"targets": [".*"]}, "name some of its layers"),
    "dropout": ({"dropout": 1.0}, "model.dropout"),
    "separator": ({"separator": -1}, "model.separator"),
    "large-separator": ({"separator": 10**30}, "model.separator"),
    "alpha": ({"alpha": float("inf")}, "model.alpha"),
    "tune": ({"tune": "all"}, "model.tune"),
    "code": ({"trust_remote_code": True}, "has no option"),
    "head": ({"tune": "head"}, ""),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_options_are_refused_before_memory_is_filled(
    name: str, plan: Plan, app: ClientApp, tmp_path: Path, listener: Listener
) -> None:
    change, reason = HOSTILE[name]
    plain = plan_for_clients(plan)
    plain["model"] = {**plain["model"], **change}
    floors = Floors(max_model_bytes=1000 if name == "head" else 100_000)
    with listener.listening() as events, pytest.raises(AtollError) as error:
        agreed(app, plain, tmp_path, floors)
    assert reason in str(error.value) and isinstance(error.value, PlanError | WorkRefused)
    assert not [path for _, path in events if path.endswith(".safetensors")]


def test_an_app_gives_directories(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: ClientApp) -> None:
    with pytest.raises(DataError, match=r"no config\.json: give the directory of a model on this machine"):
        replace(app, bases={NAME: "some/model-on-the-hub"})
    monkeypatch.chdir(base.parent)
    assert replace(app, bases={NAME: base.name}).bases == {NAME: str(base)}  # whatever the directory is later
    monkeypatch.setattr("network.apps.client", lambda: app)
    assert _app("network.apps:client", [f"more={base}"], None).bases == {
        NAME: str(tmp_path / "mine"),
        "more": str(base),
    }
    with pytest.raises(PlanError, match="--base is a name and a directory"):
        _app("network.apps:client", [str(base)], None)
