"""What docs/extending.md tells its readers to write and to type works as it stands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from docs.reading import ROOT, blocks
from network.fork_server import ForkServer


@pytest.mark.parametrize("in_checkout", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_files_of_the_page_keep_the_laws_by_the_commands_of_the_page(
    processes: ForkServer, tmp_path: Path, in_checkout: bool
) -> None:
    """Blocks that begin with a file's name are written; commands about tests/ are typed in the checkout.

    Those run what the laws' own suite does (tests/laws/test_new_members.py) once more.
    """
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
            about_tests = any(word.startswith("tests/") for word in words)
            if about_tests and not in_checkout:
                continue
            home = ROOT if about_tests else tmp_path
            done = processes.start(command, tmp_path / str(len(ran)), home, {"PYTHONPATH": paths}, python=True)
            assert done.wait(300) == 0, f"{line}\n{done.said}"
            ran.append(done.said)
    installed, own_test, *inside_and_outside = ran
    assert len(inside_and_outside) == (2 if in_checkout else 0)
    assert re.search(r"^holds   aggregators my_rules:shrunk_mean\(factor=0\.5\): a permutation", installed, re.M)
    (num_laws,) = re.findall(r"^(\d+) laws, 0 broken$", installed, re.M)
    assert re.search(rf"\b{num_laws} passed", own_test)
    for text in inside_and_outside:
        (passed,) = re.findall(r"(\d+) passed", text)
        assert int(passed) >= int(num_laws) and " failed" not in text
