"""Every command in README and docs, from the text itself: what a reader is told to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
import typer.main
from docs.reading import PAGES, ROOT, Command, blocks, commands_in, inline_commands
from docs.typing_in import Reader
from network.fork_server import ForkServer

import atoll
from atoll.cli.main import app
from atoll.core.plan import Plan

FENCED = [command for page in PAGES for block in blocks(page) for command in commands_in(block)]
INLINE = list(dict.fromkeys(inline_commands()))
ELSEWHERE = ("clusters.md",)
"""Pages whose commands need more than one machine has: tests/engine/test_clusters.py makes that up."""
WITH_COMMANDS = [
    page
    for page in PAGES
    if page.name not in ELSEWHERE and any(c.page == page.name and c.text.startswith("atoll ") for c in FENCED)
]
LONG = ("byzantine.md", "language.md", "privacy.md", "redteam.md", "split.md", "split_exposure.md")
"""Pages whose commands take more than a few seconds even when shortened."""
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.|·")


@pytest.fixture(params=["digits", pytest.param("mnist", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, tmp_path: Path, processes: ForkServer) -> Iterator[Reader]:
    """Somebody with the small data that come with Atoll, or with what the text says."""
    made = Reader(tmp_path, processes, small=request.param == "digits")
    yield made
    made.stop()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.name in LONG)) for page in WITH_COMMANDS],
)
def test_the_commands_of_a_page_work_in_order(page: Path, reader: Reader) -> None:
    assert reader.read(page)
    if reader.started:  # a server and its clients
        reader.wait_for_the_end()
        for text in ("atoll status", "atoll clients list", "atoll runs list"):
            reader.type(Command(page.name, text))
        assert "all rounds done" in reader.printed["status"] and "hospital-b" in reader.printed["clients list"]
        reader.type(Command(page.name, "atoll stop"))


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["mnist"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [c for c in INLINE if c.text.startswith(("atoll run ", "atoll data ")) and not PLACEHOLDER.search(c.text)],
    ids=str,
)
def test_a_whole_command_in_a_sentence_works(command: Command, reader: Reader) -> None:
    reader.type(command)


@pytest.mark.parametrize("reader", ["digits"], indirect=True)
def test_output_that_is_shown_has_the_words_of_the_real_one(reader: Reader) -> None:
    """Lines below a `$ command` are what it prints, numbers and times aside."""

    def words(line: str) -> str:
        return re.sub(r"[\d.,]+ ?(ms|s|kB|MB|%)?", "0", line)

    shown = [block for page in PAGES for block in blocks(page) if block.text.startswith("$ ")]
    assert shown
    for block in shown:
        (command,) = commands_in(block)
        printed = {words(line) for line in reader.type(command).splitlines()}
        for line in block.text.splitlines()[1:]:
            assert line == "..." or words(line) in printed, f"{command} does not print {line!r}"


@pytest.mark.parametrize("command", [c for c in INLINE + FENCED if c.text.startswith("atoll ")], ids=str)
def test_a_command_and_its_options_exist(command: Command) -> None:
    if "·" in command.text:
        names = re.findall(r"\w+", command.text)[1:]
        assert set(names) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        return
    words, found = shlex.split(command.text)[1:], typer.main.get_command(app)
    while isinstance(found, click.Group) or hasattr(found, "commands"):
        assert words and words[0] in found.commands, f"{command}: there is no such command"
        found, words = found.commands[words[0]], words[1:]
    options = {name for parameter in found.params for name in parameter.opts}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, f"{command}: no option {word}"


@pytest.mark.parametrize(
    "command",
    [c for c in INLINE + FENCED if not c.text.startswith("atoll ") and c.page != "extending.md"],  # test_extending
    ids=str,
)
def test_scripts_and_targets_exist(command: Command) -> None:
    program, *words = shlex.split(command.text.partition(" <<")[0].partition(" > ")[0])
    if program == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
        return
    if words[0] == "-m" and words[1].startswith("atoll."):
        import_module(words[1])
        return
    files = [word for word in words if word.endswith(".py")]
    assert files or words[0] in ("-", "-c"), f"{command}: no file is named"
    for file in files:
        text = (ROOT / file).read_text()
        compile(text, file, "exec")
        for option in [word for word in words if word.startswith("--")]:
            assert f'"{option}"' in text, f"{command}: {file} has no {option}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "python - <<" in page.read_text()], ids=lambda page: page.stem
)
def test_python_that_is_typed_in_runs(page: Path) -> None:
    for block in blocks(page):
        found = re.search(r"^python - <<'EOF'\n(.*?)^EOF$", block.text, re.MULTILINE | re.DOTALL)
        if found:
            exec(compile(found[1], page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [c for c in INLINE if c.text.startswith("python examples/")] + [Command("README.md", "make demo")],
    ids=str,
)
def test_examples_run(command: Command, tmp_path: Path) -> None:
    """`make` runs a script with the interpreter of its own environment; here it is the one that runs the tests."""
    text = command.text
    if text.startswith("make "):
        said = subprocess.run(["make", "-n", *text.split()[1:]], cwd=ROOT, check=True, capture_output=True, text=True)
        text = said.stdout.splitlines()[-1]
    script = ROOT / text.split()[-1]
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    code = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    accuracy, *reason = done.stdout.split()
    assert float(accuracy) > 0.8 and " ".join(reason) == "all rounds done"


def test_the_readme_says_one_plan_in_two_ways() -> None:
    found = {block.language: block.text for block in blocks(ROOT / "README.md")}
    names = {"atoll": atoll}
    exec(found["python"].partition("result =")[0], names)
    assert names["plan"] == Plan.from_toml(found["toml"])
