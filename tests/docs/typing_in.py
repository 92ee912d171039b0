"""Somebody who types in what a page says, line by line, in real processes and a directory of their own.

Nothing of the text is edited. What is changed is changed everywhere alike, by the tables below: the host that stands
for the reader's own, words in capitals that stand for what an earlier command printed, options that make it shorter.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from docs.reading import ROOT, Block, Command, blocks, commands_in
from network.federation import free_port, until
from network.fork_server import ForkedProcess, ForkServer

from atoll.core.errors import PlanError
from atoll.core.plan import Plan

SHORTER = {
    "run": ["--set", "rounds=2"],
    "matrix": ["--set", "rounds=1", "--f", "1"],
    "personal": ["--set", "rounds=2", "--seeds", "1"],
    "sweep": ["--set", "rounds=1", "--seeds", "1"],
    "redteam": ["--seconds", "4"],
    "compare": ["--set", "rounds=1", "--set", "policy.size=2", "--set", "data=digits"],
    "serve": ["--set", "rounds=2"],
    "data measure": ["--clients", "3", "--budget", "2"],
}
"""Options that are added to a command, so that it takes seconds; those of the text count where both say something."""
HOST = "atoll.example"
GOES_ON = {"serve": "serving", "join": ""}
"""Commands that do not end by themselves, and what they print once they are ready."""
PAGES = {"ui": "http://", "run": "the live page stays"}
"""Likewise of those that serve a page to the end of a reading; `run` with `--ui` only."""
GROUPS = ("access", "clients", "runs", "data", "plan", "privacy", "ledger")
"""Commands that have commands."""
WITH_SCRIPTS = ("language.md",)
"""Pages whose scripts are run too, since later commands need what they write."""
AT_EACH_CLIENT = ("enrol", "join")
SECONDS = 300.0


class Reader:
    """Types in commands. The operator and the first hospital sit at `directory`, the second in a directory below."""

    def __init__(self, directory: Path, fork_server: ForkServer, *, small: bool) -> None:
        self.directory, self.fork_server, self.small = directory, fork_server, small
        self.port, self.started, self.pages = free_port(), list[ForkedProcess](), list[ForkedProcess]()
        self.printed: dict[str, str] = {}
        """The last output of each command, such as `clients token`."""
        self._num = 0
        for place in (directory, directory / "hospital-b"):
            place.mkdir(parents=True, exist_ok=True)
            for name in ("hospital.py", "plan.toml"):
                text = (ROOT / "examples" / "hospitals" / name).read_text()
                (place / name).write_text(self._with_small_data(text))
        for name in ("recipes", "examples"):
            (directory / name).symlink_to(ROOT / name)

    def read(self, page: Path) -> list[str]:
        """Type in all of a page's blocks, in order; what was typed."""
        typed = []
        for block in blocks(page):
            self._note_plan(block)
            for command in commands_in(block):
                if command.text.startswith("atoll "):
                    self.type(command)
                    typed.append(command.text)
                elif page.name in WITH_SCRIPTS and command.text.startswith("python "):
                    self._run_script(command)
                    typed.append(command.text)
        return typed

    def type(self, command: Command) -> str:
        """Run a command as it stands in the text; what it printed."""
        words = shlex.split(command.text)[1:]
        name = " ".join(words[: 2 if words[0] in GROUPS else 1])
        if name.startswith("ledger"):
            self.wait_for_the_end()
        for letter in "ab" if name in AT_EACH_CLIENT else "a":
            place = self.directory if letter == "a" else self.directory / "hospital-b"
            self._run(command, name, [self._filled(word, letter) for word in words], place)
        return self.printed[name]

    def _run_script(self, command: Command) -> None:
        """Run a script of the repository in the reader's directory."""
        words = [sys.executable, *shlex.split(command.text)[1:]]
        done = subprocess.run(words, cwd=self.directory, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def wait_for_the_end(self) -> None:
        """Wait until the federation's run is over, and both hospitals have the model."""
        homes = [self.directory / "atoll-client", self.directory / "hospital-b" / "atoll-client"]
        ends = [home / "runs" / self.run_name() / "model.safetensors" for home in homes]
        until(lambda: all(path.exists() for path in ends) or self._fallen(), SECONDS, f"{ends}\n{self.said()}")
        assert not self._fallen(), self.said()

    def run_name(self) -> str:
        """The name of the only run of the server."""
        return next((self.directory / "atoll-server" / "runs").iterdir()).name

    def stop(self) -> None:
        """End what still goes on."""
        for child in (*self.started, *self.pages):
            child.kill()

    def said(self) -> str:
        """All that was printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.out")))

    def _run(self, command: Command, name: str, words: list[str], place: Path) -> None:
        words += SHORTER.get(name, [])
        words += ["--port", str(self.port)] if name == "serve" else []
        self._num += 1
        out = self.directory / f"{self._num:02} {name}.out"
        child = self.fork_server.start(words, out, place)
        ready = GOES_ON.get(name, PAGES.get(name) if name != "run" or "--ui" in words else None)
        if ready is not None:
            (self.started if name in GOES_ON else self.pages).append(child)
            until(lambda: ready in child.said or child.code is not None, SECONDS, name)
            assert child.code is None, f"{command}\n{child.said}"
        else:
            assert child.wait(SECONDS) == 0, f"{command}\n{' '.join(words)}\n{child.said}"
        self.printed[name] = child.said

    def _filled(self, word: str, letter: str) -> str:
        """A word as this reader must type it."""
        if self.small:
            word = self._with_small_data(word)
        if "TOKEN" in word:
            word = word.replace("TOKEN", self.type(Command("", "atoll clients token")).split()[-1])
        if "NAME" in word:
            word = word.replace("NAME", self.run_name())
        if word == "ID":
            word = self.printed["access list"].split()[0]
        if word == "HEX":
            word = re.findall(r"[0-9a-f]{64}", self.printed["status"])[0]
        if word == "ca.pem":
            word = str(self.directory / "certs" / "ca.pem")  # which the operator has given to everybody
        word = word.replace(f"{HOST}:8443", f"127.0.0.1:{self.port}").replace(HOST, "127.0.0.1")
        return word.replace("hospital-a", f"hospital-{letter}").replace("client_a", f"client_{letter}")

    def _note_plan(self, block: Block) -> None:
        """What a page says a plan is, commands below it mean by plan.toml."""
        if block.language == "toml":
            try:
                Plan.from_toml(block.text)
            except PlanError:
                return
            (self.directory / "plan.toml").write_text(self._with_small_data(block.text))

    def _with_small_data(self, text: str) -> str:
        """MNIST is downloaded, so that the digits that come with Atoll take its place in a `small` reading."""
        return re.sub(r"\bmnist\b", "digits", text) if self.small else text

    def _fallen(self) -> list[ForkedProcess]:
        return [child for child in self.started if child.code is not None]
