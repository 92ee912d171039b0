"""What a client keeps secret on its disk: for its owner's eyes by itself, and no longer than it is needed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from network.scripted_federation import RUN
from network.test_client_secure_session import PLAN, Sum

from atoll.ledger import chain
from atoll.network.client.home import ENDED_SESSION, EnrolledServer, Home, PendingUpdate, RunHome
from atoll.network.client.secure_session import longest_silence
from atoll.network.protocol.blobs import Disk
from atoll.network.protocol.messages import Delivery, Order
from atoll.network.server.store import Store
from atoll.secagg.client_state import ClientState
from atoll.secagg.saved import load
from atoll.secagg.server import Close


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def readable(directory: Path) -> list[str]:
    """Files that others could read, were it not for their directories."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return sorted(path.name for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077)


def test_files_are_private_whatever_the_umask_and_the_directory(tmp_path: Path, open_umask: None) -> None:
    (tmp_path / "home").mkdir(mode=0o777)
    home = Home.make(tmp_path / "home")
    home.enrolled(EnrolledServer("https://localhost", bytes(32), "0" * 32, "hospital"))
    home.peers({"0": bytes(32)})
    run = home.run("run")
    told = Delivery(b"", 1, 0.0, 1.0, bytes(64))
    (run.path / "sent.jsonl").touch(0o666)  # of an older version, which relied on the directory
    run.save_update(PendingUpdate(0, 0, "m", "p", "o", told), [b"update"], {"memory": torch.ones(2)})
    run.save_broadcast(0, torch.ones(2))
    run.save_receipt(told)
    run.add_ledger_lines(["{}"], chain.EMPTY)
    run.save_session(0, ENDED_SESSION)
    run.objects.put(b"chunk")
    assert readable(home.path) == []
    home.close()
    Disk(tmp_path / "server").put("uploads/0", b"update")
    store = Store(f"sqlite:///{tmp_path}/server/store.db")
    store.close()
    assert readable(tmp_path / "server") == []


class Half(Sum):
    """A session that stops after clients have shared their secrets."""

    def stop_half_way(self) -> RunHome:
        self.train()
        machine = self.machine()
        state, out = machine.open(self.invite())
        for answer in self.exchange(list(out)):
            state, _ = machine.handle(state, answer)
        state, out = machine.handle(state, Close(state.phase))
        self.exchange(list(out))
        home = self.scripted.clients[0]._agreed_runs[RUN].home
        session = home.session(0)
        assert session is not None and len(load(session.state, ClientState).own_secret) == 32
        return home

    def go_on(self) -> None:
        """Ask client 0 again, for the next attempt."""
        self.server.orders[0] = [Order(RUN, 1, 0, self.model)]
        self.scripted.clients[0].step()


def abandoned(half: Half) -> None:
    half.server.note(RUN, chain.ABANDON, {"attempt": 0, "why": "too few updates", "rejected": []})
    half.scripted.clients[0]._ledgers.read(RUN, half.scripted.clients[0]._agreed_runs[RUN].home)


def ended(half: Half) -> None:
    half.server.end(RUN, half.sent.params_D)
    half.scripted.clients[0].step()


def silent(half: Half) -> None:
    client, silence = half.scripted.clients[0], longest_silence(half.server.infos[RUN].plan)
    os.utime(client._agreed_runs[RUN].home.path / "talks/0", (0.0, 0.0))  # whatever the clock of the day says
    client.step()
    session = client._agreed_runs[RUN].home.session(0)
    assert session is not None and session.state
    client._now = lambda: time.monotonic() + silence + 1
    client.step()


@pytest.mark.parametrize("over", [abandoned, ended, silent])
def test_secrets_of_a_session_that_is_over_are_gone(tmp_path: Path, over: Callable[[Half], None]) -> None:
    half = Half(tmp_path, PLAN)
    with half.scripted.stack:
        home = half.stop_half_way()
        half.scripted.clients[0].step()
        session = home.session(0)
        assert session is not None and session.state  # it may still go on
        over(half)
        assert home.session(0) == ENDED_SESSION
        half.server.ended = ()
        found = half.exchange([half.post(half.invite())])  # and is not begun a second time
        assert found == [] and "its secrets are gone" in half.refusal()


def test_secrets_are_gone_once_the_next_update_is_made(tmp_path: Path) -> None:
    half = Half(tmp_path, PLAN)
    with half.scripted.stack:
        home = half.stop_half_way()
        half.go_on()
        assert home.pending().attempt == 1 and list((home.path / "talks").iterdir()) == []  # type: ignore[union-attr]


def test_a_session_that_goes_on_outlives_a_restart(tmp_path: Path) -> None:
    half = Half(tmp_path, PLAN)
    with half.scripted.stack:
        home = half.stop_half_way()
        before = home.session(0)
        half.scripted.homes[0].close()
        half.scripted.homes[0] = Home.open(half.scripted.path / "client-0")
        half.scripted.start(0)
        half.scripted.clients[0].step()
        assert home.session(0) == before
