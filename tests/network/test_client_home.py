"""What a client keeps on disk: for one process, for its owner's eyes, and whole after every kill."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.errors import DataError, DiskFull, PlanError, RunError
from atoll.ledger import chain
from atoll.network.client.app import ClientApp, device_attributes
from atoll.network.client.home import EnrolledServer, Home, PendingUpdate, RunHome
from atoll.network.protocol.messages import Delivery, RunInfo
from atoll.network.protocol.objects import manifest_of

SERVER = EnrolledServer("https://atoll.example", bytes(32), "0" * 32, "hospital")
INFO = RunInfo("run", {"rounds": 3, "seed": 1}, "hash", 3, 3, 100, 10)


def keep(home: RunHome, attempt: int, state: dict[str, torch.Tensor], data: bytes = b"update") -> None:
    manifest = manifest_of(data)
    told = Delivery(msgspec.msgpack.encode(manifest), 10, 0.5, 10.0, bytes(64))
    home.save_update(PendingUpdate(attempt, 0, "0" * 64, "1" * 64, manifest.name(), told), [data], state)


@pytest.fixture
def home(tmp_path: Path) -> RunHome:
    return RunHome(tmp_path / "run")


def test_keys_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    first = Home.make(tmp_path / "home")
    key, secret = first.key.private_bytes_raw(), first.secret("run")
    assert {(tmp_path / "home" / name).stat().st_mode & 0o777 for name in ("key", "secret")} == {0o600}
    first.close()
    again = Home.make(tmp_path / "home")  # enrolment was interrupted
    assert (again.key.private_bytes_raw(), again.secret("run")) == (key, secret)
    assert again.secret("other") != secret and len(secret) == 32
    again.enrolled(SERVER)
    again.close()
    with pytest.raises(RunError, match="join with it"):
        Home.make(tmp_path / "home")
    opened = Home.open(tmp_path / "home")
    assert opened.server() == SERVER
    opened.close()
    with pytest.raises(RunError, match="atoll enrol"):
        Home.open(tmp_path / "nowhere")


def test_two_processes_cannot_share_a_home(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.enrolled(SERVER)
    other = os.fork()
    if other == 0:
        try:
            Home.open(home.path)
        except RunError as error:
            os._exit(7 if "in use by another process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 7


def test_what_counted_is_remembered_and_nothing_else(home: RunHome) -> None:
    assert home.state() == (-1, {}) and home.pending() is None and home.last_trained() == (-1, -1)
    keep(home, 0, {"a": torch.ones(2)})
    home.confirm_update(None)
    assert home.state() == (-1, {}) and home.last_trained()[0] == 0
    home.confirm_update(0)
    attempt, state = home.state()
    assert (
        attempt == 0
        and torch.equal(state["a"], torch.ones(2))
        and home.pending() is None
        and home.last_trained()[0] == 0
    )
    keep(home, 4, {"a": torch.zeros(2)}, b"second")
    keep(home, 5, {}, b"third")
    home.confirm_update(4)  # the server is behind: that one is gone
    again = RunHome(home.path)
    found = again.pending()
    assert again.state()[0] == 0 and found is not None and found.attempt == 5 and again.last_trained()[0] == 5
    assert len(again.sent_objects) == 3
    assert bytes(again.update()) == b"third" and found.object == manifest_of(b"third").name()


def test_broadcasts_are_remembered_with_their_version(home: RunHome) -> None:
    assert home.last_broadcast() is None
    whole = torch.arange(10.0)
    home.save_broadcast(7, whole[::2])  # a view of something larger
    found = home.last_broadcast()
    assert found is not None and found[0] == 7 and torch.equal(found[1], whole[::2])


def test_a_line_that_was_cut_off_was_never_there(home: RunHome) -> None:
    key = Ed25519PrivateKey.generate()
    first, head = chain.start({}, key)
    second, last = chain.add(head, "commit", {}, key)
    home.add_ledger_lines([first, second], last)
    keep(home, 0, {})
    for name in ("ledger.jsonl", "sent.jsonl"):
        with (home.path / name).open("ab") as file:
            file.write(b'{"half a li')
    again = RunHome(home.path)
    assert again.ledger_lines() == [first, second] and again.head == last and again.sent_objects == home.sent_objects
    third, end = chain.add(last, "commit", {}, key)
    again.add_ledger_lines([third], end)
    assert chain.verify(RunHome(home.path).ledger_lines()) is None


def test_lines_that_a_loss_of_power_spoilt_are_had_again(home: RunHome) -> None:
    key = Ed25519PrivateKey.generate()
    first, head = chain.start({}, key)
    home.add_ledger_lines([first], head)
    with (home.path / "ledger.jsonl").open("ab") as file:
        file.write(bytes(100) + b"\n{}\n")
    again = RunHome(home.path)
    assert again.ledger_lines() == [first] and again.head == head


def test_a_run_may_become_longer_but_not_another(home: RunHome) -> None:
    home.save_info(INFO)
    home.save_info(msgspec.structs.replace(INFO, plan={"rounds": 9, "seed": 1}, num_clients=5))
    with pytest.raises(PlanError, match="another plan"):
        home.save_info(msgspec.structs.replace(INFO, plan={"rounds": 3, "seed": 2}))


def test_damage_is_named(home: RunHome) -> None:
    keep(home, 0, {"a": torch.ones(2)})
    (home.path / "pending.safetensors").write_bytes(b"rubbish")
    with pytest.raises(RunError, match="cannot be read"):
        home.pending()


def test_a_full_disk_leaves_everything_as_it_was(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(home, 0, {"a": torch.ones(2)})
    before = {path: path.read_bytes() for path in home.path.rglob("*") if path.is_file()}

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="free some"):
        keep(home, 1, {}, b"more")
    with pytest.raises(DiskFull):
        home.save_broadcast(1, torch.ones(3))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in before} == before
    keep(home, 1, {}, b"more")
    assert RunHome(home.path).last_trained()[0] == 1


def test_a_device_tells_what_its_system_tells(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    assert device_attributes(tmp_path) == {}
    write("proc/loadavg", "0.01 0.2 0.3 1/100 5")
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    2000000 kB")
    (tmp_path / "sys/class/power_supply").mkdir(parents=True)
    assert device_attributes(tmp_path) == {"idle": True, "memory": 2048.0, "charging": True}
    write("sys/class/power_supply/BAT0/type", "Battery")
    write("sys/class/power_supply/BAT0/status", "Discharging")
    write("sys/class/power_supply/BAT0/capacity", "37")
    write("proc/loadavg", "900.0 0.2 0.3 1/100 5")
    assert device_attributes(tmp_path) == {"idle": False, "memory": 2048.0, "charging": False, "battery": 0.37}
    write("sys/class/power_supply/AC/type", "Mains")
    write("sys/class/power_supply/AC/online", "1")
    assert device_attributes(tmp_path)["charging"] is True
    here = device_attributes()
    assert isinstance(here["idle"], bool) and here["memory"] > 100  # a real Linux


def test_an_app_checks_its_samples_at_once_and_its_attributes_when_asked() -> None:
    x, y = torch.zeros(2, 3).numpy(), torch.tensor([0, 1]).numpy()
    app = ClientApp(train_x=x, train_y=y, num_classes=2, attributes=lambda: {"idle": x[0, 0] == 0, "battery": y[1]})
    assert app.current_attributes() == {"idle": True, "battery": 1.0} and type(app.current_attributes()["idle"]) is bool
    with pytest.raises(DataError, match="attributes failed with ZeroDivisionError"):
        ClientApp(train_x=x, train_y=y, num_classes=2, attributes=lambda: {"idle": 1 / 0}).current_attributes()
    with pytest.raises(DataError, match="labels must be in"):
        ClientApp(train_x=torch.zeros(2, 3).numpy(), train_y=torch.tensor([0, 7]).numpy(), num_classes=2)
