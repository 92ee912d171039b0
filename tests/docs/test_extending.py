"""What docs/extending.md tells its readers to write and to type works as it stands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from docs.reading import ROOT, blocks
from network.fork_server import ForkServer


def test_the_files_of_the_page_keep_the_laws_by_the_commands_of_the_page(processes: ForkServer, tmp_path: Path) -> None:
    """Blocks that begin with a file's name are written; commands about tests/ are typed in the checkout."""
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran: list[str] = []
    for block in blocks(ROOT / "docs" / "extending.md"):
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named:
            (tmp_path / named[1]).write_text(block.text)
        for line in block.text.splitlines() if block.language == "sh" else []:
            program, *words = shlex.split(line)
            command = [*(["-m", "pytest", "-p", "no:cacheprovider"] if program == "pytest" else []), *words]
            assert program in ("python", "pytest")
            home, out = ROOT if any(word.startswith("tests/") for word in words) else tmp_path, tmp_path / str(len(ran))
            done = processes.start(command, out, home, {"PYTHONPATH": paths}, python=True)
            assert done.wait(300) == 0, f"{line}\n{done.said}"
            ran.append(done.said)
    installed, own_test, inside, outside = ran
    assert re.search(r"^holds   aggregators my_rules:shrunk_mean\(factor=0\.5\): a permutation", installed, re.M)
    (num_laws,) = re.findall(r"^(\d+) laws, 0 broken$", installed, re.M)
    assert re.search(rf"\b{num_laws} passed", own_test)
    for text in (inside, outside):
        (passed,) = re.findall(r"(\d+) passed", text)
        assert int(passed) >= int(num_laws) and " failed" not in text
