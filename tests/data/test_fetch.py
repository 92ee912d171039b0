"""Fetching: whole and checked, or not at all; and when nothing works, a message that helps."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import DataError
from atoll.data import fetch, sources
from atoll.data.fetch import STALE_SECONDS, cache_dir, raw_files, sha256_of
from atoll.data.sources import Apt, Https, Npm, Pip, RawFile, Source, Unreachable
from atoll.data.unpack import as_is, from_tar, from_zip, gunzip

CONTENT = {"a.bin": b"island " * 10_000, "b.bin": bytes(range(256)) * 40}
FILES = tuple(
    RawFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for name, content in CONTENT.items()
)


def home(url: str) -> Source:
    return Source(route=Https(tuple(f"{url}/{name}.gz" for name in CONTENT)), unpack=gunzip)


def publish(web: Any, content: dict[str, bytes] = CONTENT) -> None:
    web.pages = {f"/{name}.gz": gzip.compress(value, mtime=0) for name, value in content.items()}


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def tar_gz(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, value in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))
    return packed.getvalue()


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_download_then_cache(web: Any, cache: Path) -> None:
    publish(web)
    paths = raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert {name: path.read_bytes() for name, path in paths.items()} == CONTENT
    assert everything_in(cache) == ["toy", "toy/a.bin", "toy/b.bin", "toy/verified.json"]
    assert raw_files("toy", FILES, [home(web.url)], quiet=True) == paths
    assert len(web.asked) == 2


def test_unchanged_files_are_not_read_again(web: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(web)
    raw_files("toy", FILES, [home(web.url)], quiet=True)
    hashed: list[Path] = []

    def spy(path: Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    monkeypatch.setattr(fetch, "sha256_of", spy)
    raw_files("toy", FILES, [], quiet=True)
    assert hashed == []
    os.utime(cache / "toy" / "a.bin", (1, 1))
    raw_files("toy", FILES, [], quiet=True)
    assert hashed == [cache / "toy" / "a.bin"]


def test_a_spoilt_cache_heals_with_one_warning(web: Any, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(web)
    raw_files("toy", FILES, [home(web.url)], quiet=True)
    (cache / "toy" / "a.bin").write_bytes(b"x" * len(CONTENT["a.bin"]))
    (cache / "toy" / "verified.json").write_text("{not json")
    with caplog.at_level(logging.WARNING):
        paths = raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert paths["a.bin"].read_bytes() == CONTENT["a.bin"]
    assert len(caplog.records) == 1
    assert "a.bin has an unexpected SHA-256" in caplog.text


def test_wrong_bytes_never_enter_the_cache(web: Any, cache: Path) -> None:
    publish(web, CONTENT | {"b.bin": CONTENT["b.bin"][::-1]})
    with pytest.raises(DataError, match=r"b\.bin has SHA-256 \w{12}\.\.\., expected \w{12}\.\.\."):
        raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert everything_in(cache) == ["toy"]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "has fewer than the 10240 bytes"), (b"+" * 10_241, "has more than the 10240 bytes")]
)
def test_wrong_sizes_are_told_apart(web: Any, cache: Path, content: bytes, reason: str) -> None:
    publish(web, CONTENT | {"b.bin": content})
    with pytest.raises(DataError, match=f"b.bin {reason}"):
        raw_files("toy", FILES, [home(web.url)], quiet=True)


def test_a_broken_download_leaves_nothing(web: Any, cache: Path) -> None:
    publish(web)
    web.broken = {"/b.bin.gz"}
    with pytest.raises(DataError, match="could not be fetched"):
        raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert everything_in(cache) == ["toy"]
    web.broken = set()
    assert raw_files("toy", FILES, [home(web.url)], quiet=True)["b.bin"].read_bytes() == CONTENT["b.bin"]


def test_a_killed_download_leaves_no_half_file(web: Any, cache: Path) -> None:
    publish(web)
    web.go_on.clear()
    program = (
        "import sys; from atoll.data.fetch import raw_files; from atoll.data.sources import *;"
        "from atoll.data.unpack import gunzip;"
        "f = RawFile(name='a.bin', num_bytes=70000, sha256=sys.argv[2]);"
        "raw_files('toy', [f], [Source(route=Https((sys.argv[1],)), unpack=gunzip)], quiet=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, f"{web.url}/a.bin.gz", FILES[0].sha256])
    assert web.half_sent.wait(30)
    child.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    child.wait(30)
    web.go_on.set()
    assert not (cache / "toy" / "a.bin").exists()
    left = list((cache / "toy").glob(".fetch-*"))
    assert len(left) == 1
    # A day later the remains are swept away.
    day_ago = left[0].stat().st_mtime - STALE_SECONDS - 10
    os.utime(left[0], (day_ago, day_ago))
    raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert everything_in(cache) == ["toy", "toy/a.bin", "toy/b.bin", "toy/verified.json"]


def test_the_next_source_is_tried(web: Any, cache: Path) -> None:
    publish(web)
    sources_in_order = [home(closed_port()), home(f"{web.url}/elsewhere"), home(web.url)]
    assert raw_files("toy", FILES, sources_in_order, quiet=True)["a.bin"].read_bytes() == CONTENT["a.bin"]
    assert web.asked[0] == "/elsewhere/a.bin.gz"


def test_archives_put_there_by_hand_come_first(web: Any, cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    for name, content in CONTENT.items():
        (cache / "toy" / f"{name}.gz").write_bytes(gzip.compress(content))
    raw_files("toy", FILES, [home(web.url)], quiet=True)
    assert web.asked == []


def test_damaged_archives_are_no_crash(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / "a.bin.gz").write_bytes(gzip.compress(CONTENT["a.bin"])[:-50])
    (cache / "toy" / "b.bin.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.bin\.gz, b\.bin\.gz in .*: damaged \("):
        raw_files("toy", FILES, [home(closed_port())], quiet=True)


def test_when_nothing_works_the_message_helps(web: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "no-python-here")
    down = closed_port()
    routes = [
        home(down),
        home(f"{web.url}/gone"),
        Source(route=Npm("@isle/toy-data", "1.0.0"), unpack=from_tar("package")),
        Source(route=Pip("toy-data", "2.0", "0" * 64), unpack=as_is),
        Source(route=Apt("dataset-toy"), unpack=as_is),
    ]
    with pytest.raises(DataError) as caught:
        raw_files("toy", FILES, routes, quiet=True)
    message = str(caught.value)
    for line in (
        "toy could not be fetched. Tried:",
        f"  - cache {cache / 'toy'}: not there: a.bin, b.bin",
        f"  - {down}: ",
        f"  - {web.url}/gone: HTTP status 404",
        "  - npm @isle/toy-data@1.0.0: npm is not installed here",
        "  - pip toy-data==2.0: no-python-here is not installed here",
        "  - apt dataset-toy: apt-get is not installed here",
        "set ATOLL_DATA=DIR): a.bin, b.bin; or a.bin.gz, b.bin.gz; or isle-toy-data-1.0.0.tgz",
        "install npm",
        "install pip",
        'use data = "digits", which needs no download',
    ):
        assert line in message
    assert message.count("or a.bin.gz") == 1


@dataclass(frozen=True)
class FullDisk:
    label: str = "a full disk"
    archives: tuple[str, ...] = ("x",)
    advice: str = ""

    def download(self, into: Path, quiet: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named(cache: Path) -> None:
    with pytest.raises(DataError, match=r"the disk is full.*set ATOLL_DATA to another directory") as caught:
        raw_files("toy", FILES, [Source(route=FullDisk(), unpack=as_is)], quiet=True)
    assert str(cache / "toy") in str(caught.value)
    assert everything_in(cache) == ["toy"]


def test_a_cache_that_is_no_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot keep data in .*; free space or grant access there, or set ATOLL_DATA"):
        raw_files("toy", FILES, [home(closed_port())], quiet=True)


def test_paths_inside_archives_are_not_followed(tmp_path: Path) -> None:
    packed = tmp_path / "in" / "toy.tgz"
    packed.parent.mkdir()
    tricks = {"../evil": b"1", "/evil": b"2", "package/../../evil": b"3", "package/sub/a.bin": b"4"}
    packed.write_bytes(tar_gz(tricks | {f"package/{name}": content for name, content in CONTENT.items()}))
    (tmp_path / "out").mkdir()
    from_tar("package")([packed], FILES, tmp_path / "out")
    assert everything_in(tmp_path) == ["in", "in/toy.tgz", "out", "out/a.bin", "out/b.bin"]


def test_links_in_the_place_of_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "toy.tgz").write_bytes(tar_gz({"package/a.bin": CONTENT["a.bin"]}, {"package/b.bin": "/etc/hostname"}))
    with pytest.raises(Unreachable, match=r"toy\.tgz has no package/b\.bin"):
        from_tar("package")([tmp_path / "toy.tgz"], FILES, tmp_path)


def test_members_larger_than_they_should_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.tgz").write_bytes(tar_gz({"package/a.bin": b"0" * 10**6}))
    with pytest.raises(Unreachable, match=r"a\.bin in toy\.tgz has 1000000 bytes; expected 70000"):
        from_tar("package")([tmp_path / "toy.tgz"], FILES, tmp_path)


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, value in members.items():
            packed.writestr(name, value)
    return path


def test_a_wheel_in_the_cache_is_unpacked_by_the_names_of_its_members(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    members = {f"toy_data/files/{name}": value for name, value in CONTENT.items()}
    wheel(cache / "toy/toy_data-2.0-py3-none-any.whl", {"../../evil": b"", "/evil": b"", "a.bin": b"", **members})
    source = Source(route=Pip("toy-data", "2.0", "0" * 64, wheel="py3-none-any"), unpack=from_zip("toy_data/files"))
    paths = raw_files("toy", FILES, [source], quiet=True)
    assert {name: path.read_bytes() for name, path in paths.items()} == CONTENT
    assert not list(cache.parent.rglob("*evil*"))


def test_wheels_that_are_not_what_they_should_be_are_refused(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    packed = cache / "toy" / "toy_data-2.0-py3-none-any.whl"
    source = Source(route=Pip("toy-data", "2.0", "0" * 64, wheel="py3-none-any"), unpack=from_zip("files"))
    for members, reason in (
        ({"files/a.bin": CONTENT["a.bin"]}, "toy_data-2.0-py3-none-any.whl has no files/b.bin"),
        ({"files/a.bin": bytes(2**22), "files/b.bin": b""}, "a.bin has more than the 70000 bytes expected"),
    ):
        wheel(packed, members)
        with pytest.raises(DataError, match=reason):
            raw_files("toy", FILES, [source], quiet=True)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"toy_data-2\.0-py3-none-any\.whl: damaged"):
        raw_files("toy", FILES, [source], quiet=True)


def test_endless_downloads_are_cut_off(web: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(web)
    monkeypatch.setattr(sources, "MAX_DOWNLOAD", 100)
    with pytest.raises(DataError, match="larger than 100 bytes"):
        raw_files("toy", FILES, [home(web.url)], quiet=True)


def fake_client(folder: Path, name: str, script: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name first on the PATH."""
    path = folder / name
    path.write_text("\n".join((f"#!{sys.executable}", *script)))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


posix = pytest.mark.skipif(sys.platform == "win32", reason="writes an executable script")


@posix
def test_npm_is_asked_without_a_shell(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ready.tgz").write_bytes(tar_gz({f"package/{name}": content for name, content in CONTENT.items()}))
    script = (
        "import shutil, sys",
        "assert sys.argv[1] == 'pack' and '--ignore-scripts' in sys.argv and sys.argv[-1] == 'toy;touch evil@1.0.0'",
        f"shutil.copy({str(tmp_path / 'ready.tgz')!r}, 'toy;touch evil-1.0.0.tgz')",
    )
    fake_client(tmp_path, "npm", script, monkeypatch)
    paths = raw_files(
        "toy", FILES, [Source(route=Npm("toy;touch evil", "1.0.0"), unpack=from_tar("package"))], quiet=True
    )
    assert paths["b.bin"].read_bytes() == CONTENT["b.bin"]


@posix
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            ["import sys; sys.exit('npm error code E404\\nnpm error 404 No matching version')"],
            "404 No matching version",
        ),
        (["import sys; sys.exit(7)"], "npm ended with 7"),
        (["pass"], "it did not provide toy-1.0.0.tgz"),
        (["import threading; threading.Event().wait()"], "npm did not finish within 1 s"),
    ],
)
def test_a_client_that_fails_gives_its_reason(
    script: list[str], reason: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client(tmp_path, "npm", script, monkeypatch)
    monkeypatch.setattr(sources, "CLIENT_SECONDS", 1.0 if "Event" in script[0] else 30.0)
    with pytest.raises(DataError, match=f"npm toy@1.0.0: {reason}"):
        raw_files("toy", FILES, [Source(route=Npm("toy", "1.0.0"), unpack=from_tar("package"))], quiet=True)


def test_the_real_pip_gives_its_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataError, match=r"pip toy-data==2\.0: "):
        raw_files("toy", FILES, [Source(route=Pip("toy-data", "2.0", "0" * 64), unpack=as_is)], quiet=True)


def test_progress_goes_to_stderr_and_can_be_silenced(web: Any, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    publish(web)
    raw_files("loud", FILES, [home(web.url)])
    out, err = capfd.readouterr()
    assert out == "" and err == "fetching a.bin.gz\nfetching b.bin.gz\n"
    raw_files("silent", FILES, [home(web.url)], quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_sees_a_bar(web: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    publish(web)
    monkeypatch.setenv("FORCE_COLOR", "1")
    raw_files("toy", FILES, [home(web.url)])
    out, err = capfd.readouterr()
    assert out == "" and "fetching a.bin.gz" in err and "bytes" in err


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/atoll")),
        ("linux", {}, Path.home() / ".cache/atoll"),
        ("darwin", {}, Path.home() / "Library/Caches/atoll"),
        ("win32", {"LOCALAPPDATA": "/l"}, Path("/l/atoll")),
        ("linux", {"ATOLL_DATA": "~/mine"}, Path.home() / "mine"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_it(
    platform: str, variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ATOLL_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir() == expected
