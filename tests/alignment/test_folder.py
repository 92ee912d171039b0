"""The shared folder: what cannot be written or read there is said, and parties are processes that may be killed."""

from __future__ import annotations

import csv
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from network.federation import until
from network.fork_server import ForkedProcess, ForkServer

from atoll.alignment.curve import AlignmentError
from atoll.alignment.envelope import Way
from atoll.alignment.folder import Folder
from atoll.core.errors import DataError

SECRET = "32 bytes that the parties agreed\n"
FIRST = Way("bank", "shop", 1)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a share that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_folder_keeps_no_part_of_a_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with files_of_at_most(10), pytest.raises(DataError, match=r"001.atoll cannot be written to .*\(File too large\)"):
        folder.write(FIRST, bytes(100))
    assert not list(tmp_path.iterdir())
    folder.write(FIRST, bytes(100))
    with pytest.raises(AlignmentError, match="run one process of each party"):
        folder.write(FIRST, bytes(100))
    assert [path.name for path in tmp_path.iterdir()] == ["bank-to-shop-001.atoll"]


def test_a_folder_that_cannot_be_used_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no directory: make it, or mount the share"):
        Folder(tmp_path / "none")
    with pytest.raises(DataError, match=r"/proc cannot be written to \(.*\), and each party writes its files there"):
        Folder(Path("/proc"))
    with files_of_at_most(0), pytest.raises(DataError, match=r"File too large.*make room"):
        Folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_process_of_the_same_party_that_writes_now_is_noticed(tmp_path: Path) -> None:
    (tmp_path / ".bank-to-shop-001.atoll.new").touch()
    with pytest.raises(AlignmentError, match="run one process of each party"):
        Folder(tmp_path).write(FIRST, b"x")
    assert [path.name for path in tmp_path.iterdir()] == [".bank-to-shop-001.atoll.new"]


def test_word_that_a_party_stops_is_no_error_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    folder = Folder(tmp_path / "shared")
    folder.stop("bank")
    folder.stop("bank")
    assert folder.has_stopped("bank") and not folder.has_stopped("shop")
    (tmp_path / "shared" / "shop-stopped.atoll").symlink_to(tmp_path / "else")
    folder.stop("shop")
    assert not (tmp_path / "else").exists()
    (tmp_path / "shared").rename(tmp_path / "away")
    folder.stop("club")


class Parties(NamedTuple):
    """Tables of parties in directories of their own, beside a folder that they share."""

    root: Path
    processes: ForkServer

    @classmethod
    def made(cls, root: Path, processes: ForkServer, ids: dict[str, list[str]]) -> Parties:
        for name, each in ids.items():
            (root / name).mkdir(parents=True)
            lines = "".join(f"{id},{number}\n" for number, id in enumerate(each))
            (root / name / f"{name}.csv").write_text(f"patient,of_{name}\n{lines}")
            (root / name / "secret").write_text(SECRET)
        (root / "shared").mkdir()
        return cls(root, processes)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def start(self, name: str, *options: str) -> ForkedProcess:
        argv = ["align", f"{name}.csv", "--column", "patient", "--through", "../shared", "--as", name]
        argv += ["--secret-file", "secret", "--workers", "1", *options]
        return self.processes.start(argv, self.root / name / "said", self.root / name)

    def joined(self, name: str) -> list[list[str]]:
        with (self.root / name / "aligned" / f"{name}.csv").open() as file:
            return list(csv.reader(file))


IDS = {
    "bank": [f"P{number}" for number in range(30)],
    "shop": [f"p{number} " for number in range(40, 10, -1)],
    "club": [f"P{number}" for number in range(0, 40, 2)],
}
ASKS = ("--ask", "shop", "--ask", "club")


@pytest.fixture
def parties(tmp_path: Path, processes: ForkServer) -> Parties:
    pytest.importorskip("private_set_intersection", reason="joining records needs: pip install 'atoll[psi]'")
    return Parties.made(tmp_path, processes, IDS)


def test_parties_elsewhere_get_the_rows_of_a_join_on_one_machine(parties: Parties) -> None:
    running = [
        parties.start("shop", "--asked-by", "bank"),
        parties.start("club", "--asked-by", "bank", "--workers", "2"),
    ]
    running.append(parties.start("bank", *ASKS))
    for process in running:
        assert process.wait(60) == 0, process.said
    rows = {name: parties.joined(name) for name in IDS}
    assert all(head == ["patient", f"of_{name}"] for name, (head, *_) in rows.items())
    ids = {tuple(row[0].strip().lower() for row in each[1:]) for each in rows.values()}
    assert len(ids) == 1 and set(*ids) == {f"p{number}" for number in range(12, 30, 2)}
    assert all(row == [IDS[name][int(row[1])], row[1]] for name, each in rows.items() for row in each[1:])
    local = [f"{name}/{name}.csv" for name in IDS]
    out, root = parties.root / "local.said", parties.root
    assert parties.processes.start(["align", *local, "--column", "patient", "--out", "one"], out, root).wait(60) == 0
    for name in IDS:
        with (root / "one" / f"{name}.csv").open() as file:
            assert sorted(csv.reader(file)) == sorted(rows[name])
    tables = [f"{name}/aligned/{name}.csv" for name in IDS]
    assert parties.processes.start(["align", "--check", *tables], root / "check.said", root).wait(60) == 0
    assert "shop: 30 ids, 19 in common with the 30 of bank" in running[-1].said
    assert "bank: 30 ids, 9 of the 30 of shop are common to all parties" in running[0].said
    assert "remove the files in ../shared" in running[0].said


def test_only_the_number_is_learnt_where_no_more_is_wanted(parties: Parties) -> None:
    shop = parties.start("shop", "--asked-by", "bank", "--count")
    bank = parties.start("bank", "--ask", "shop", "--count")
    assert (shop.wait(60), bank.wait(60)) == (0, 0), shop.said + bank.said
    assert "shop: 30 ids, 19 in common" in bank.said and "it alone learns how many are common" in shop.said
    assert not (parties.root / "bank" / "aligned").exists() and not (parties.root / "shop" / "aligned").exists()


def begun(parties: Parties, *options: str) -> tuple[ForkedProcess, ForkedProcess]:
    """Start bank and shop, which come as far as they can without the club."""
    bank, shop = parties.start("bank", *ASKS, *options), parties.start("shop", "--asked-by", "bank", *options)
    until((parties.shared / "shop-to-bank-002.atoll").exists, 60, lambda: bank.said + shop.said)
    return bank, shop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_party_that_is_stopped_tells_the_others(parties: Parties, number: signal.Signals) -> None:
    bank, shop = begun(parties)
    shop.signal(number)
    assert shop.wait(30) == 130 and "Traceback" not in shop.said
    assert bank.wait(30) == 3 and "shop has stopped before the end (shop-stopped.atoll is in ../shared)" in bank.said
    late = parties.start("club", "--asked-by", "bank")
    assert late.wait(30) == 3 and "holds files of another session" in late.said
    for each in parties.shared.iterdir():
        each.unlink()
    running = [parties.start(name, "--asked-by", "bank") for name in ("shop", "club")] + [parties.start("bank", *ASKS)]
    assert [each.wait(60) for each in running] == [0, 0, 0], "".join(each.said for each in running)


def test_a_party_that_was_killed_cannot_go_on_and_is_not_waited_for_without_end(parties: Parties) -> None:
    bank, shop = begun(parties, "--patience", "1.5s")
    shop.kill()
    assert bank.wait(30) == 3 and "waited 1.5s in vain for" in bank.said
    again = parties.start("shop", "--asked-by", "bank")
    assert again.wait(30) == 3 and "a session that was interrupted cannot go on" in again.said
    assert not (parties.root / "shop" / "aligned" / "shop.csv").exists()


def test_two_processes_of_one_party_do_not_mix(parties: Parties) -> None:
    bank, shop = begun(parties)
    other = parties.start("shop", "--asked-by", "bank")
    assert other.wait(30) == 3 and "holds files of another session" in other.said
    assert bank.code is None and shop.code is None
    club = parties.start("club", "--asked-by", "bank")
    assert [each.wait(60) for each in (bank, shop, club)] == [0, 0, 0]
