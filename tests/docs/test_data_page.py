"""What docs/data.md tells its readers to type and to write works as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

from docs.reading import ROOT, blocks, commands_in
from network.fork_server import ForkServer


def test_the_commands_and_the_python_of_the_page_run(processes: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = blocks(ROOT / "docs" / "data.md")
    for number, command in enumerate(command for block in page for command in commands_in(block)):
        typed = processes.start(shlex.split(command.text)[1:], tmp_path / f"{number}.out", tmp_path)
        assert typed.wait(300) == 0, typed.said
    (tmp_path / "page.py").write_text("\n".join(block.text for block in page if block.language == "python"))
    done = processes.start(["page.py"], tmp_path / "out", tmp_path, err=tmp_path / "err", python=True)
    assert done.wait(300) == 0, (tmp_path / "err").read_text()
    first, same, reason = done.said.splitlines()
    assert "('healthy', 'ill')" in first and "'smoker=yes'" in first and "('a', 'b')" in first
    assert same == "True ('healthy', 'ill')" and reason == "all rounds done"
