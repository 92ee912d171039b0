"""`tools/lock.py` with the real pip: what was locked is installed, and nothing else under its name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "lock.py"


def wheel(directory: Path, text: str) -> None:
    """A package of one line."""
    directory.mkdir(exist_ok=True)
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny-1.0-py3-none-any.whl", "w") as file:
        file.writestr("tiny.py", text)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def pip(directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    offline = ["--isolated", "--no-index", "--find-links", str(directory)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_only_what_was_locked_is_installed(tmp_path: Path) -> None:
    wheels, report, lock = tmp_path / "wheels", tmp_path / "report.json", tmp_path / "requirements.lock"
    wheel(wheels, "WHO = 'us'")
    made = pip(wheels, "--dry-run", "--ignore-installed", "--report", str(report), "tiny")
    assert made.returncode == 0, made.stderr
    told = subprocess.run([sys.executable, TOOL, report], capture_output=True, text=True, check=True).stdout
    assert told.startswith("tiny==1.0 --hash=sha256:")
    lock.write_text(told)
    locked = ["--require-hashes", "--no-deps", "--requirement", str(lock), "--target"]
    assert pip(wheels, *locked, str(tmp_path / "installed")).returncode == 0
    assert (tmp_path / "installed" / "tiny.py").read_text() == "WHO = 'us'"
    wheel(wheels, "WHO = 'somebody else'")
    refused = pip(wheels, *locked, str(tmp_path / "other"))
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr
