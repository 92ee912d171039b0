"""What a real server writes of real clients can be audited, says who took part, and says no more than it may."""

from __future__ import annotations

import hmac
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from network.in_process_server import client_of, operated, serving

from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.ledger.audit import Findings, audit
from atoll.ledger.chain import BROADCAST, read
from atoll.network.client.app import ClientApp
from atoll.network.server import secure_session
from atoll.network.server.ledger_records import cohort_entries, rejected_entries
from atoll.network.server.operations import Operations
from atoll.network.server.runs import CommitResult, Run
from atoll.network.server.store import Store
from atoll.network.server.tables import ClientRow, Stage, Status, TaskRow
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import derived
from atoll.secagg.scheme import Outcome
from atoll.train.federation import build_federation

SMALL: dict[str, Any] = {
    "partition": {"name": "iid", "num_clients": 4},
    "local": {"lr": 0.1, "batch_size": 32},
    "rounds": 4,
}
BUFFERED = {**SMALL, "policy": {"name": "buffered", "concurrency": 3, "size": 2}}
PRIVATE = {
    **SMALL,
    "sampler": "poisson",
    "policy": {"size": 3},
    "privacy": {"name": "central", "clip": 1.0, "sigma": 1.0, "delta": 1e-3},
}


def trained(
    path: Path, plan: Plan, why: str = "all rounds done", hubs: list[Operations] | None = None
) -> tuple[Path, list[str], bytes]:
    """Let four clients train a plan until it ends; the run's directory on the server, its ledger, and the server's key.

    Somebody who wants to have a hand in it gets the hub into a list.
    """
    federation = build_federation(plan)
    data = federation.dataset
    with ExitStack() as stack:
        operations = stack.enter_context(operated(path / "server", num_clients=4))
        url = stack.enter_context(serving(operations))
        if hubs is not None:
            hubs.append(operations)
        threads = []
        for number in range(4):
            own = federation.partition.indices(number)
            samples = {"train_x": data.train_x[own], "train_y": data.train_y[own], "scale": data.scale}
            app = ClientApp(**samples, num_classes=data.num_classes, attributes=dict)
            threads.append(client_of(operations, url, path / f"client-{number}", app))
        operations.add_run("small", plan)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert operations.status()["runs"][0]["status"] == why
        lines = operations.ledger_lines("small")
    file = path / "server/runs/small/ledger.jsonl"
    assert file.read_text().splitlines() == lines
    for kept in path.glob("client-*/runs/small/ledger.jsonl"):  # of those who were asked
        assert kept.read_text().splitlines() == lines
    return file.parent, lines, operations.server_key


@pytest.mark.parametrize("fields", [SMALL, BUFFERED], ids=["cohort", "buffered"])
def test_every_update_that_counted_is_told_and_signed(tmp_path: Path, fields: dict[str, Any]) -> None:
    _, lines, key = trained(tmp_path, Plan(**fields))
    found = audit(lines, key)
    assert isinstance(found, Findings), found
    size = 2 if "policy" in fields else 4
    assert found.rounds == 4 and sum(signer.num_updates for signer in found.signers) == 4 * size
    assert found.ended == "all rounds done"


@pytest.mark.parametrize(
    "downlink",
    [[], ["half"], ["delta", {"name": "top_k", "fraction": 0.1}]],
    ids=["plain", "coded", "differences"],
)
def test_what_clients_are_sent_is_in_the_ledger_once_a_version(tmp_path: Path, downlink: list[Any]) -> None:
    _, lines, key = trained(tmp_path, Plan(**{**SMALL, "downlink": downlink}))
    found = audit(lines, key)
    assert isinstance(found, Findings) and found.broadcasts == found.rounds == 4, found
    records = [record for record, _ in map(read, lines)]
    assert [record.kind for record in records] == ["start", *["broadcast", "commit"] * 4, "end"]
    sent = {record.body["version"]: record.body["object"] for record in records if record.kind == "broadcast"}
    counted = [each for record in records if record.kind == "commit" for each in record.body["cohort"]]
    assert len(counted) == 16 and all(each["broadcast"] == sent[each["version"]] for each in counted)


def test_a_sum_that_came_to_nothing_is_tried_again_on_what_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, sums = secure_session.hold_session, list[str]()

    def lost_once(*args: Any) -> Outcome:
        sums.append("")
        return Outcome(None, (), 0, 0, "nobody answers") if len(sums) == 2 else session(*args)

    monkeypatch.setattr(secure_session, "hold_session", lost_once)
    _, lines, key = trained(tmp_path, Plan(**{**SMALL, "secagg": {}, "downlink": ["half"]}))
    found = audit(lines, key)
    assert isinstance(found, Findings) and (found.rounds, found.abandoned, found.broadcasts) == (4, 1, 4), found


def test_where_privacy_rests_on_it_nobody_learns_who_took_part(tmp_path: Path) -> None:
    directory, lines, key = trained(tmp_path, Plan(**PRIVATE))
    found = audit(lines, key)
    assert isinstance(found, Findings), found
    assert found.rounds == 4 and found.signers == () and found.epsilon is not None
    commits = [record for record, _ in map(read, lines) if record.kind == "commit"]
    assert all(record.body["cohort"] == record.body["rejected"] == [] for record in commits)
    secret = Ledger.read(directory / "privacy.ledger", Plan(**PRIVATE).identity()).secret
    store = Store(f"sqlite:///{tmp_path}/server/store.db")
    for record in commits:  # with the run's secret the seal can be opened
        with store.read() as tables:
            rows, clients = tables.tasks("small", record.body["attempt"]), tables.clients()
        counted = [row.task for row in rows if row.stage is Stage.COUNTED]
        people = {"cohort": cohort_entries(rows, counted, clients), "rejected": rejected_entries(rows)}
        text = json.dumps(people, sort_keys=True, separators=(",", ":")).encode()
        key = derived(secret, "seal", record.body["attempt"])
        assert record.body["sealed"] == hmac.digest(key, text, "sha256").hex()
    store.close()


@pytest.mark.parametrize("name", ["ftrl", "distributed"])
def test_updates_that_only_the_server_protects_are_not_named(tmp_path: Path, name: str) -> None:
    """A hash of a plain update, or its number of samples, would tell every client what the noise is to hide."""
    plan = Plan(**{**PRIVATE, "sampler": "round_robin", "privacy": {**PRIVATE["privacy"], "name": name}})
    _, lines, key = trained(tmp_path, plan)
    assert isinstance(audit(lines, key), Findings)
    commits = [record for record, _ in map(read, lines) if record.kind == "commit"]
    assert len(commits) == 4
    assert all(record.body["cohort"] == [] and len(record.body["sealed"]) == 64 for record in commits)
    told = [line for line in lines if read(line)[0].kind != BROADCAST]  # which names what everybody is sent
    assert not any(word in line for line in told for word in ("num_samples", '"object"'))


def test_a_run_that_is_ended_while_a_version_is_made_ends_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = Run.commit, list[str]()

    def interrupted(run: Run, *args: Any) -> CommitResult:
        found = make(run, *args)
        made.append(found.state_file)
        if len(made) == 3:
            hubs[0].stop_run(run.name)
        return found

    monkeypatch.setattr(Run, "commit", interrupted)
    hubs = list[Operations]()
    directory, lines, key = trained(tmp_path, Plan(**SMALL), "interrupted", hubs)
    found = audit(lines, key)
    assert isinstance(found, Findings) and (found.rounds, found.ended) == (2, "interrupted"), found
    assert [path.name for path in directory.glob("*state-*")] == made[1:2]
    with operated(tmp_path / "server", num_clients=4) as again:
        assert again.status()["runs"][0]["status"] == "interrupted"


def test_a_client_that_was_shut_out_since_is_told_all_the_same() -> None:
    clients = [ClientRow(f"{n:032x}", f"c{n}", bytes([n]) * 32, Status.REVOKED, n, 1, 0, 10) for n in range(3)]
    report = {"num_samples": 10, "loss": 0.5, "weight": 10.0}
    rows = [
        TaskRow(Task(0, 3, 4), Stage.COUNTED, "ab" * 32, report, bytes(64), 1),
        TaskRow(Task(1, 3, 4), Stage.FAILED, "", {"why": "refused: not today"}, b"", 2),
        TaskRow(Task(2, 3, 4), Stage.COUNTED, "", {}, b"", 3),
    ]
    told, in_secret = cohort_entries(rows, [rows[0].task, rows[2].task], clients)
    assert told["key"] == "00" * 32 and told["object"] == "ab" * 32 and told["loss"] == 0.5 and told["version"] == 3
    assert "object" not in in_secret and "loss" not in in_secret and in_secret["client"] == 2
    assert rejected_entries(rows, [Task(2, 3, 4)]) == [
        {"client": 1, "attempt": 4, "why": "refused: not today"},
        {"client": 2, "attempt": 4, "why": "left out"},
    ]
