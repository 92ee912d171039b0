"""The files for people who work on Atoll: what they say to type works, and what they state is so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from docs.reading import ROOT, blocks
from network.fork_server import ForkServer

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
SLOW = "make test"
"""Would run all tests from within a test."""


def typed(page: str) -> list[str]:
    """Return the commands of a page's blocks, without their comments."""
    found = [line.partition(" #")[0].strip() for block in blocks(ROOT / page) for line in block.text.splitlines()]
    assert found
    return found


TYPED = sorted({command for page in ("CONTRIBUTING.md", "AGENTS.md") for command in typed(page)})


@pytest.mark.parametrize("command", [each for each in TYPED if each.startswith("make ")])
def test_targets_exist_and_are_described(command: str) -> None:
    subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)
    target = command.split()[1]
    assert target == "install" or f"make {target} " in MAKEFILE, f"make help does not say what {command} does"


def run_elsewhere() -> set[str]:
    """Return the tests that the page on extending names, which test_extending runs."""
    lines = [line for block in blocks(ROOT / "docs" / "extending.md") for line in block.text.splitlines()]
    return {f".venv/bin/{line}" for line in lines if line.startswith("pytest ")}


@pytest.mark.parametrize("command", sorted({each for each in TYPED if "pytest" in each} - run_elsewhere()))
def test_tests_that_are_named_pass(processes: ForkServer, tmp_path: Path, command: str) -> None:
    program, *words = command.split()
    assert program == ".venv/bin/pytest"
    done = processes.start(["-m", "pytest", "-p", "no:cacheprovider", *words], tmp_path / "out", ROOT, python=True)
    assert done.wait(300) == 0, done.said
    assert re.search(r"[1-9]\d* passed", done.said), done.said


def requirements(group: str) -> list[str]:
    """Return the packages of a dependency group, with those of the groups that it includes."""
    entries = PROJECT["dependency-groups"][group]
    return [
        name
        for each in entries
        for name in (requirements(each["include-group"]) if isinstance(each, dict) else [re.split("[<>=]", each)[0]])
    ]


def test_every_tool_that_is_typed_is_installed() -> None:
    """By the group that `make install` installs, under a version that constraints.txt pins."""
    provides = {"pre-commit": "pre-commit", "pytest": "pytest", "ruff": "ruff", "python": "", "mypy": "mypy"}
    provides |= {"lint-imports": "import-linter", "coverage": "coverage"}
    texts = [*TYPED, *re.findall(r"\$\(BIN\)/([\w-]+)", MAKEFILE), (ROOT / ".pre-commit-config.yaml").read_text()]
    tools = {tool for text in texts for tool in re.findall(r"\.venv/bin/([\w-]+)", text)}
    tools |= set(re.findall(r"\$\(BIN\)/([\w-]+)", MAKEFILE))
    assert tools == provides.keys()
    assert {provides[tool] for tool in tools} - {""} <= set(requirements("dev"))
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in _constraints()}
    assert {name.lower().partition("[")[0] for name in requirements("dev")} | {"pip"} <= pins


def _constraints() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_the_hooks_are_what_make_check_runs() -> None:
    hooks = re.findall(r"^ +entry: \.venv/bin/(.*?)(?: --force-exclude)?$", _text(".pre-commit-config.yaml"), re.M)
    checks = re.search(r"^check: install\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert checks is not None
    commands = [line.removeprefix("\t$(BIN)/") for line in checks[1].splitlines()]
    assert hooks == [re.sub(r" (--check|\.)", "", command) for command in commands]
    assert "repo: local" in _text(".pre-commit-config.yaml") and _text(".pre-commit-config.yaml").count("repo:") == 1


def _text(path: str) -> str:
    return (ROOT / path).read_text()


def test_the_citation_is_of_this_version() -> None:
    fields = dict(re.findall(r"^([a-z-]+): (.*)$", _text("CITATION.cff"), re.M))
    assert fields["cff-version"] == "1.2.0" and fields["message"] and "Atoll" in fields["title"]
    assert fields["version"] == PROJECT["project"]["version"]
    assert fields["license"] == PROJECT["project"]["license"]
    assert re.search(r"^authors:\n  - name: The Atoll developers$", _text("CITATION.cff"), re.M)


def test_the_python_of_the_api_page_runs(processes: ForkServer, tmp_path: Path) -> None:
    code = [block.text for block in blocks(ROOT / "docs" / "api.md") if block.language == "python"]
    (tmp_path / "page.py").write_text("\n".join(code))
    page = processes.start(["page.py"], tmp_path / "out", tmp_path, err=tmp_path / "err", python=True)
    assert page.wait(300) == 0, (tmp_path / "err").read_text()
    ended, *rows, last = page.said.splitlines()
    accuracy, reason = ended.split(" ", 1)
    assert float(accuracy) > 0.5 and reason == "all rounds done"
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert float(last) > 0.8


def test_the_readme_leads_to_these_pages() -> None:
    names = ("CONTRIBUTING", "SECURITY", "docs/api", "docs/glossary", "docs/stability", "docs/decisions/index")
    assert all(f"({name}.md)" in _text("README.md") for name in names)
