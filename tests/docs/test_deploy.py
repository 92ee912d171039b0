"""The files in examples/hospitals/deploy: every command that they start works, in processes instead of containers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from network.federation import free_port, until
from network.fork_server import ForkedProcess, ForkServer, fork_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "hospitals" / "deploy"
SECONDS = 300.0


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    with fork_server() as started:
        yield started


class Machine:
    """A machine whose paths are directories of a test, and whose hosts are this one."""

    def __init__(self, root: Path, processes: ForkServer, paths: dict[str, str]) -> None:
        self.root, self.processes, self.port = root, processes, free_port()
        self.paths = {before: str(root / after) for before, after in paths.items()}
        self.started: list[ForkedProcess] = []
        for name in ("hospital.py", "plan.toml"):  # MNIST is downloaded: digits come with Atoll
            text = (DEPLOY.parent / name).read_text()
            (root / name).write_text(re.sub(r"\bmnist\b", "digits", text))

    def start(self, command: str, **changes: str) -> ForkedProcess:
        """Start `atoll` with these arguments, with every path, host and port of the file put in its place."""
        paths = {**self.paths, **{before: str(self.root / after) for before, after in changes.items()}}
        for before, after in paths.items():
            command = re.sub(rf"(?<![\w/]){re.escape(before)}(?![\w-])", after, command)
        command = re.sub(r"https://[\w.]+:8443", f"https://127.0.0.1:{self.port}", command)
        command = re.sub(r"--port 8443", f"--port {self.port}", command)
        command = re.sub(r"--admin-port 8444", "--admin-port 0", command)
        command = re.sub(r"certs (\S+) --host server", r"certs \1 --host 127.0.0.1", command)
        words = shlex.split(command)
        words += ["--set", "rounds=2"] if words[0] == "serve" else []
        child = self.processes.start(words, self.root / f"{len(self.started)} {words[0]}.out", self.root)
        self.started.append(child)
        return child

    def done(self, command: str, **changes: str) -> str:
        """Run a command to its end; what it printed."""
        child = self.start(command, **changes)
        assert child.wait(SECONDS) == 0, f"{command}\n{child.said}"
        return child.said.strip()

    def serving(self, command: str) -> None:
        """Start the server, and wait until it is there."""
        server = self.start(command)
        until(lambda: "serving" in server.said or server.code is not None, SECONDS)
        assert server.code is None, server.said

    def stop(self) -> None:
        for child in self.started:
            child.kill()


def wait_for_models(*homes: Path) -> None:
    until(lambda: all((home / "runs/hospitals/model.safetensors").exists() for home in homes), SECONDS, f"{homes}")


def compose() -> tuple[dict[str, str], list[str]]:
    """The command of each service, and the commands of the comment, one a line."""
    text = (DEPLOY / "compose.yaml").read_text()
    comment = re.sub(r"\\\n#", "", "\n".join(re.findall(r"^#   .*(?:\n#     .*)*", text, re.M)))
    services = {}
    for name, body in re.findall(r"^  ([\w-]+):(?: &\w+)?\n((?:    .*\n)+)", text, re.M):
        found = re.search(r"^    command: (?:>-\n((?:      .*\n)+)|(.*)\n)", body, re.M)
        assert found is not None, name
        services[name] = " ".join((found[1] or found[2]).split())
    return services, [" ".join(line[1:].split()) for line in comment.splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_compose_file(processes: ForkServer, tmp_path: Path) -> None:
    services, comment = compose()
    assert set(services) == {"server", "hospital-a", "hospital-b"}
    machine = Machine(tmp_path, processes, {"/home/atoll/server": "server", "/certs": "certs", "/work": "."})
    enrolling = next(line for line in comment if " enrol " in line)
    approving = next(line for line in comment if " approve " in line)
    token = next(line for line in comment if " token " in line)
    certs = next(line for line in comment if " certs " in line)
    try:
        machine.done(certs.rpartition(" atoll ")[2])
        machine.serving(services["server"])
        for name in ("hospital-a", "hospital-b"):
            secret = machine.done(token.rpartition(" atoll ")[2]).split()[-1]
            command = re.sub(r"^.*? hospital-a (?=enrol)", "", enrolling)
            command = command.replace("TOKEN", secret).replace("hospital-a", name)
            machine.done(command, **{"/home/atoll/client": name})
            machine.start(services[name], **{"/home/atoll/client": name})
        assert "hospital-b is client 1" in machine.done(approving.rpartition(" atoll ")[2])
        wait_for_models(tmp_path / "hospital-a", tmp_path / "hospital-b")
    finally:
        machine.stop()


def unit(name: str) -> tuple[str, str]:
    """What a unit starts, and the command in its comment, without the program."""
    text = (DEPLOY / f"atoll-{name}.service").read_text()
    started = re.search(r"^ExecStart=\S+ ((?:.*\\\n)*.*)$", text, re.M)
    assert started is not None
    comment = re.sub(r"\s*\\?\n# *", " ", text.partition("[Unit]")[0])
    first = re.search(r"/opt/atoll/bin/atoll (enrol .*|status)", comment)
    assert first is not None
    return " ".join(started[1].replace("\\\n", "").split()), first[1].strip()


@pytest.mark.slow
def test_the_commands_of_the_units(processes: ForkServer, tmp_path: Path) -> None:
    serving, status = unit("server")
    joining, enrolling = unit("client")
    paths = {
        "/var/lib/atoll": "server",
        "/etc/atoll/server.pem": "certs/server.pem",
        "/etc/atoll/ca.pem": "certs/ca.pem",
    }
    machine = Machine(tmp_path, processes, {**paths, "%d/server.key": "certs/server.key"})
    home = f" --home {tmp_path / 'server'}"
    try:
        machine.done("certs certs --host 127.0.0.1")
        machine.serving(serving)
        for letter in "ab":
            secret, name = machine.done("clients token" + home).split()[-1], f"hospital-{letter}"
            place = {"/var/lib/atoll-client": name}
            machine.done(enrolling.replace("TOKEN", secret).replace("hospital-a", name), **place)
            machine.start(joining.replace("client_a", f"client_{letter}"), **place)
        machine.done("clients approve hospital-a hospital-b" + home)
        wait_for_models(tmp_path / "hospital-a", tmp_path / "hospital-b")
        assert "all rounds done" in machine.done(status + home)
    finally:
        machine.stop()


def test_units_are_well_formed(tmp_path: Path) -> None:
    analyse = shutil.which("systemd-analyze")
    for name in ("server", "client"):
        text = (DEPLOY / f"atoll-{name}.service").read_text()
        path = tmp_path / f"atoll-{name}.service"
        path.write_text(re.sub(r"/opt/atoll/bin/atoll", "/bin/true", text))  # it asks whether the program is there
        assert re.search(r"^\[Service\]$", text, re.M)
        if analyse is not None:
            done = subprocess.run([analyse, "verify", path], capture_output=True, text=True)
            assert path.name not in done.stderr, done.stderr


def test_the_image_has_all_that_it_installs() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert "src" in sources and all((ROOT / source).exists() for source in sources)
    readme = re.search(r'^readme = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert readme is not None and readme[1] in sources
    assert re.search(r'^ENTRYPOINT \["atoll"\]$', text, re.M)
