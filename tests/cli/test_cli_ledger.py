"""Test `atoll ledger` on files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ledger.honest_ledger import RUN, SERVER, digest, honest_records, public, signed_lines

from atoll.network.client.home import EnrolledServer

LINES, HEADS = signed_lines(honest_records())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(line + "\n" for line in LINES))
    return tmp_path / "run"


def test_a_complete_ledger_is_summarised(cli: Any, run: Path) -> None:
    said = cli("ledger", "verify", run, "--key", public(SERVER).hex())
    assert said.code == 0 and said.err == ""
    for text in (f"run {RUN}", "7 records", "4 rounds", "1 abandoned", "2 updates rejected", "all rounds done"):
        assert text in said.out
    assert "3 updates counted" in said.out and public(SERVER).hex() in said.out and HEADS[-1].hash in said.out
    assert "compare it" in cli("ledger", "verify", run).out


def test_the_first_bad_record_is_named(cli: Any, run: Path) -> None:
    file = run / "ledger.jsonl"
    file.write_text(file.read_text().replace('"loss":1.1', '"loss":1.2', 1))
    said = cli("ledger", "verify", run)
    assert said.code == 5 and "record 3 was changed" in said.err and said.err.count("\n") == 1
    file.write_bytes(b"\xff\xfe".join(file.read_bytes().split(b"mnist", 1)))
    assert "record 0 is not a record" in cli("ledger", "verify", run).err
    file.write_text("")
    assert "empty" in cli("ledger", "verify", run).err


def test_another_key_and_a_truncated_ledger_are_detected(cli: Any, run: Path, tmp_path: Path) -> None:
    mallory = Ed25519PrivateKey.generate()
    assert "record 0" in cli("ledger", "verify", run, "--key", public(mallory).hex()).err
    note = tmp_path / "head.json"
    note.write_text(json.dumps(HEADS[4]._asdict()))
    assert cli("ledger", "verify", run, "--head", note).code == 0
    (run / "ledger.jsonl").write_text("\n".join(LINES[:3]) + "\n")
    assert "record 3 was dropped: 5 records were seen before" in cli("ledger", "verify", run, "--head", note).err
    copy = tmp_path / "client"
    copy.mkdir()
    (copy / "ledger.jsonl").write_text("\n".join(LINES[:4]) + "\n")
    assert "record 3 was dropped" in cli("ledger", "verify", run, "--head", copy).err
    assert cli("ledger", "verify", copy, "--head", run, "--running").code == 0


@pytest.mark.parametrize("left", [1, 3, 6])
def test_a_ledger_without_its_end_is_reported(cli: Any, run: Path, left: int) -> None:
    (run / "ledger.jsonl").write_text("\n".join(LINES[:left]) + "\n")
    said = cli("ledger", "verify", run)
    assert said.code == 6 and "the end is missing" in said.out and "later ones may have been cut off" in said.err
    said = cli("ledger", "verify", run, "--running")
    assert said.code == 0 and "still running" in said.out and not said.err
    (run / "ledger.jsonl").write_text("".join(f"{line}\n" for line in LINES))
    assert cli("ledger", "verify", run, "--running").code == 0


def test_acknowledged_updates_must_be_in_the_ledger(cli: Any, run: Path, tmp_path: Path) -> None:
    client = tmp_path / "client"
    client.mkdir()
    receipts = [{"client": 0, "attempt": 0, "object": digest("0/0")}, {"client": 1, "attempt": 2, "object": ""}]
    (client / "receipts.jsonl").write_text("".join(json.dumps(receipt) + "\n" for receipt in receipts))
    assert cli("ledger", "verify", run, "--receipts", client).code == 0  # one is counted, the other rejected
    dropped = {"client": 1, "attempt": 5, "object": digest("1/5")}
    with (client / "receipts.jsonl").open("a") as file:
        file.write(json.dumps(dropped) + "\n")
    said = cli("ledger", "verify", run, "--receipts", client)
    assert said.code == 5 and "record 5 neither counts nor rejects the update of client 1 in attempt 5" in said.err
    (client / "ledger.jsonl").write_text("".join(f"{line}\n" for line in LINES))
    assert cli("ledger", "verify", client).code == 5  # the receipts in the directory itself are read by default
    assert "cannot be read as receipts" in cli("ledger", "verify", run, "--receipts", tmp_path).err


def test_the_server_key_is_read_from_a_clients_home(cli: Any, run: Path, tmp_path: Path) -> None:
    home = tmp_path / "client"
    (home / "runs").mkdir(parents=True)
    run.rename(home / "runs" / RUN)
    for key, says in ((SERVER, "signed by server"), (Ed25519PrivateKey.generate(), "record 0 was changed")):
        server = EnrolledServer(url="https://x", server_key=public(key), client="ab" * 16, name="north")
        (home / "server.json").write_bytes(msgspec.json.encode(server))
        said = cli("ledger", "verify", home / "runs" / RUN)
        assert says in said.out + said.err and "compare it" not in said.out


def test_control_characters_do_not_reach_the_terminal(cli: Any, run: Path) -> None:
    records = honest_records()
    records[-1][1]["reason"] = "\x1b[2Jall is well"
    (run / "ledger.jsonl").write_text("\n".join(signed_lines(records)[0]) + "\n")
    for command in ("show", "verify"):
        said = cli("ledger", command, run)
        assert said.code == 0 and "?[2Jall is well" in said.out and "\x1b" not in said.out


def test_show_prints_one_line_for_each_record(cli: Any, run: Path) -> None:
    with (run / "ledger.jsonl").open("a") as file:
        file.write('rubbish\n{"number":1}\n')
    said = cli("ledger", "show", run)
    lines = said.out.splitlines()
    assert said.code == 0 and len(lines) == 9
    assert "version 2 of clients 0,2" in lines[3] and "epsilon 0.25" in lines[3] and "1 rejected" in lines[3]
    assert "too few updates" in lines[2] and "all rounds done" in lines[6]
    assert "is not a record" in lines[7] and "is not a record" in lines[8]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["verify", "nowhere"], 5, "name the directory of a run"),
        (["verify", "run", "--key", "abc"], 2, "64 hexadecimal"),
        (["verify", "run", "--head", "plan.toml"], 5, "neither a copy"),
        (["show", "nowhere"], 5, "there is no"),
    ],
)
def test_unreadable_input_is_refused_with_the_way_out(
    cli: Any, run: Path, argv: list[str], code: int, says: str
) -> None:
    Path("plan.toml").write_text("rounds = 3")
    said = cli("ledger", *argv)
    assert said.code == code and says in said.err and said.err.count("\n") == 1
