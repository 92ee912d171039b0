"""Worker processes that begin anew, build the plan themselves and work on a device each: no device survives a fork."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from atoll.core.errors import AtollError, PlanError, RunError
from atoll.engine.base import stack_size, trainer_of, tried_there
from atoll.engine.pipes import receive, send
from atoll.engine.processes import Processes, devices_of, serve
from atoll.engine.rebuild import rebuilt_job
from atoll.train.devices import Place, TorchSettings
from atoll.train.job import Job
from atoll.train.trainer import Trainer


class Spawned(Processes):
    """A farm of workers with a place each; what they are asked and answer is as of forked ones."""

    def __init__(
        self,
        job: Job,
        plan: bytes,
        place: Place,
        *,
        workers: int | None,
        cohort: int,
        stack: int | None,
        compile: bool,
        kernels: bool,
    ) -> None:
        self._place, self._places = place, devices_of(place, workers)
        how = {"cohort": cohort, "stack": stack, "compile": compile, "kernels": kernels}
        self._order: dict[str, Any] = {"plan": plan.hex(), **how}
        self._lifelines: list[int] = []
        super().__init__(job, FarTrainer(job), len(self._places))

    def _start(self, num_workers: int) -> None:
        """Start the first worker, which finds out how many clients it trains as one, and then the others alike."""
        assert isinstance(self.trainer, FarTrainer)
        try:
            self._begin(self._places[0])
            first = self._ready(0)
            self.trainer.settle(first)
            self._order |= {"stack": self.trainer.stack, "kernels": self.trainer.kernels}
            for place in self._places[1:]:
                self._begin(place)
            for number in range(1, num_workers):
                self._ready(number)
        except BaseException:
            self.close()
            raise

    def _begin(self, place: Place) -> None:
        here, there = Pipe()
        ours, theirs = os.pipe()
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno()), str(ours)],
            pass_fds=(there.fileno(), ours),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        there.close()
        os.close(ours)
        self._lifelines.append(theirs)
        self._pipes.append(here)
        self._workers.append(SpawnedWorker(child))
        self._send(here, {**self._order, "place": [place.device, place.precision, place.tf32]}, {})

    def _ready(self, number: int) -> dict[str, Any]:
        try:
            header, _ = receive(self._pipes[number])
        except (EOFError, ConnectionResetError) as error:
            raise self._death(self._pipes[number]) from error
        if "error" in header:
            raise (PlanError if header["refused"] else RunError)(header["error"])
        return header

    def describe(self) -> dict[str, object]:
        """Name and settings."""
        return {**super().describe(), **self._place.described()}

    def close(self) -> None:
        """End the workers and give torch its threads back."""
        super().close()
        while self._lifelines:
            os.close(self._lifelines.pop())


class SpawnedWorker:
    """A process that was started, as the farm looks at it."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @property
    def exitcode(self) -> int | None:
        """How it ended; None while it lives."""
        return self._child.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return self._child.poll() is None

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()


class FarTrainer(Trainer):
    """The server's own trainer, on the processor, which groups clients for workers elsewhere."""

    def settle(self, said: dict[str, Any]) -> None:
        """Group clients as the workers train them, by what the first of them says."""
        self.stack, self.compile, self.kernels = int(said["stack"]), bool(said["compile"]), bool(said["kernels"])
        self.alone_because, self.slow_because = said["alone_because"], said["slow_because"]


def main() -> None:
    """Build the plan that comes by a pipe, say that all is ready, and answer requests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # to stop is the parent's business
    pipe, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        order, _ = receive(pipe)
        try:
            trainer = _trainer(order)
        except AtollError as error:
            send(pipe, {"error": str(error), "refused": isinstance(error, PlanError)})
        except Exception as error:
            send(pipe, {"error": f"a worker failed to begin: {type(error).__name__}: {error}", "refused": False})
        else:
            names = ("stack", "compile", "kernels", "alone_because", "slow_because")
            send(pipe, {name: getattr(trainer, name) for name in names})
            serve(pipe, trainer)
    sys.stdout.flush()
    os._exit(0)


def _trainer(order: dict[str, Any]) -> Trainer:
    """Build the trainer of an order, and rehearse a step of it where it is to work."""
    job, place = rebuilt_job(bytes.fromhex(order["plan"])), Place(*order["place"])
    TorchSettings(place)

    def make() -> Trainer:
        stack = stack_size(job, order["cohort"], place) if order["stack"] is None else order["stack"]
        return trainer_of(job, stack, order["compile"], order["kernels"], place=place)

    return tried_there(place, make)


def _end_with(lifeline: int) -> None:
    """End when the parent does, for any reason: it alone holds the other end, and never writes."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
