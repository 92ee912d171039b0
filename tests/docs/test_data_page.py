"""What docs/data.md tells its readers to type and to write works as it stands."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from docs.reading import ROOT, blocks, commands_in

ATOLL = [sys.executable, "-c", "from atoll.cli.main import main; main()"]


def test_the_commands_and_the_python_of_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = blocks(ROOT / "docs" / "data.md")
    for command in (command for block in page for command in commands_in(block)):
        words = [*ATOLL, *shlex.split(command.text)[1:]]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "page.py").write_text("\n".join(block.text for block in page if block.language == "python"))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    first, same, reason = done.stdout.splitlines()
    assert "('healthy', 'ill')" in first and "'smoker=yes'" in first and "('a', 'b')" in first
    assert same == "True ('healthy', 'ill')" and reason == "all rounds done"
