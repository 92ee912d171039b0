"""Workers on a Ray cluster, on one machine or on many: each builds the job from the plan and folds its own clients."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from atoll.core.errors import PlanError, RunError, TrainingError
from atoll.core.messages import State
from atoll.core.options import Count, above
from atoll.core.plan import Plan
from atoll.engine.base import (
    Engine,
    Stack,
    Workers,
    settings_of,
    single_threaded,
    stack_size,
    trainer_of,
    unheard,
    worker_count,
)
from atoll.engine.pipes import grouped
from atoll.engine.pooled import Message, Pooled
from atoll.engine.ray_cluster import LOCAL, Address, Cluster, Gpus, connect, connected, in_short, why_lost
from atoll.engine.ray_worker import RayWorker
from atoll.engine.rebuild import blueprint, pack, unpack
from atoll.train.devices import CPU, Place, Precision
from atoll.train.job import Job
from atoll.train.trainer import Trainer

MAX_TRIES = 3
"""A group of clients whose worker was lost so often ends the run: it is probably the group that kills them."""
JOIN_SECONDS = 3.0
"""How often the cluster is looked at for room for further workers."""
BEAT = 1.0
"""Seconds that are waited at most before the cluster is looked at again."""


def ray(
    job: Job,
    cohort: Count = 10,
    address: Address = "auto",
    workers: Workers | None = None,
    gpus_per_worker: Gpus = 0.0,
    stack: Stack | None = None,
    compile: bool = False,
    kernels: bool = False,
    precision: Precision = "float32",
    tf32: bool = False,
    working_dir: str = "",
    patience: Annotated[float, above(0)] = 60.0,
    plan: Plan | None = None,
    tell: Callable[[str], None] = unheard,
) -> Engine:
    """Share groups of clients out to workers on a Ray cluster, one on every free CPU unless `workers` says otherwise.

    `address` is `auto`, `local`, `HOST:PORT` or `ray://HOST:PORT`. Workers with GPUs compute on "cuda", in `precision`
    and `tf32` as of the engine `inline`; the stack is then that of a processor unless it is given. `working_dir` is a
    directory with code and data of one's own that Ray copies to every machine. Workers that find no room within
    `patience` seconds are a refusal. The result is the same to the bit as with `processes`, for any number of workers
    and machines.
    """
    if plan is None:
        raise PlanError('engine "ray" builds the job from a plan, and there is none here: use engine = "processes"')
    place = Place("cuda" if gpus_per_worker else CPU, precision, tf32)
    with single_threaded():
        trainer = trainer_of(job, stack_size(job, cohort) if stack is None else stack, compile, kernels, tell)
    data = blueprint(plan, job)
    tell("connecting to Ray")
    cpus = worker_count(workers) if address == LOCAL else None
    cluster = connect(address, what='engine "ray"', cpus=cpus, working_dir=working_dir)
    engine = RayEngine(
        job,
        trainer,
        cluster,
        data,
        wanted=workers,
        gpus=gpus_per_worker,
        place=place,
        move=not working_dir,
        patience=patience,
    )
    try:
        with connected():
            engine.open(tell)
    except BaseException:
        engine.close()
        raise
    return engine


@dataclass(eq=False)
class Member:
    """A worker as the driver sees it: it has one call at a time."""

    handle: Any
    stage: str = "placing"
    """`placing`, then `building`, then `idle` or `working`."""
    call: Any = None
    desk: Desk | None = None
    number: int = -1
    """What it works at: a request of this desk."""
    known: set[str] = field(default_factory=set)
    """The broadcasts that it has."""


class Desk:
    """Requests of one evaluation or round: which are to be done, and the answers in the order of the requests."""

    def __init__(self, requests: Iterable[Message]) -> None:
        self._source = enumerate(requests)
        self._open: dict[int, Message] = {}
        self._again: list[int] = []
        self._tries: dict[int, int] = {}
        self._answers: dict[int, Message] = {}
        self._next_out, self._exhausted = 0, False

    def take(self, num_workers: int) -> int | None:
        """Return the number of a request to do: none is far ahead of the oldest missing answer, so few are held."""
        if self._again:
            return self._again.pop(0)
        newest = max([*self._open, *self._answers, self._next_out])
        if self._exhausted or newest - self._next_out > 2 * num_workers:
            return None
        item = next(self._source, None)
        if item is None:
            self._exhausted = True
            return None
        self._open[item[0]] = item[1]
        return item[0]

    def request(self, number: int) -> Message:
        """Return a request that is not answered."""
        return self._open[number]

    def answer(self, number: int, message: Message) -> None:
        """Note an answer."""
        del self._open[number]
        self._answers[number] = message

    def give_back(self, number: int, why: str) -> None:
        """Let a request be done again whose worker was lost, unless that has happened too often."""
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] >= MAX_TRIES:
            raise RunError(
                f"{MAX_TRIES} workers were lost one after another at the same clients ({why}): if memory ran out, set "
                "a smaller engine.stack or fewer engine.workers; then continue with --resume"
            )
        self._again = sorted([*self._again, number])

    def pop(self) -> Message | None:
        """Return the next answer, if it is there."""
        message = self._answers.pop(self._next_out, None)
        self._next_out += message is not None
        return message

    @property
    def is_done(self) -> bool:
        """Whether all requests have been answered and handed on."""
        return self._exhausted and not self._open and not self._answers


class RayEngine(Pooled):
    """Hands requests to workers on a cluster, replaces those that are lost, and hires on machines that join."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        cluster: Cluster,
        data: bytes,
        *,
        wanted: int | None,
        gpus: float,
        place: Place,
        move: bool,
        patience: float,
    ) -> None:
        super().__init__(job, trainer)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._cluster, self._ray, self._lost = cluster, cluster.ray, why_lost(cluster.ray)
        self._wanted, self._gpus, self._patience = wanted, gpus, patience
        self._place = place
        where = {"device": place.device, "precision": place.precision, "tf32": place.tf32, "move": move}
        how = {"stack": trainer.stack, "compile": trainer.compile, "kernels": trainer.kernels}
        self._settings = pack({**how, **where})
        self._data: Any = None
        self._blueprint = data
        self._members: list[Member] = []
        self._objects: dict[str, Any] = {}  # broadcasts in the object store, by name
        self._versions: dict[str, str] = {}
        self._look: str | None = None
        self._serial, self._looked_at, self._seen_alive = 0, 0.0, 0.0
        self._hires = True

    @property
    def num_workers(self) -> int:
        """How many workers there are at the moment."""
        return len(self._members)

    def describe(self) -> dict[str, object]:
        """Name and settings; address and workers are left out, because they change nothing."""
        gpus: dict[str, object] = {"gpus_per_worker": self._gpus} if self._gpus else {}
        place = {key: value for key, value in self._place.described().items() if key != "device"}
        return settings_of("ray", self.trainer) | gpus | place

    def open(self, tell: Callable[[str], None]) -> None:
        """Start the workers, and wait until each has built the job; too little room is refused."""
        self._data = self._ray.put(self._blueprint)
        room = self._cluster.slots(self._gpus)
        num = self._wanted if self._wanted is not None else max(1, room)
        tell(f"starting {num} worker{'s' if num != 1 else ''} on Ray")
        for _ in range(num):
            self._hire()
        started = time.monotonic()
        while any(member.stage in ("placing", "building") for member in self._members):
            placing = [member for member in self._members if member.stage == "placing"]
            if placing and time.monotonic() - started > self._patience:
                placed = num - len(placing)
                if self._wanted is None and placed:
                    self._dismiss(placing)  # others were faster
                    continue
                raise RunError(self._no_room(num, placed))
            self._settle(opening=True)
        self._seen_alive = self._looked_at = time.monotonic()

    def close(self) -> None:
        """End the workers and the connection; a cluster that was there before stays."""
        self._dismiss(list(self._members))
        self._objects, self._data = {}, None
        with contextlib.suppress(Exception):  # a cluster that is gone needs no goodbye
            self._cluster.close()
        torch.set_num_threads(self._threads)

    def _no_room(self, num: int, placed: int) -> str:
        each = f"a CPU and {self._gpus:g} GPUs" if self._gpus else "a CPU"
        return (
            f"{placed} of {num} workers found room within {self._patience:g} seconds, each of which needs {each} of "
            f"its own; the cluster has {self._cluster.in_words()}: set engine.workers lower, add machines, wait until "
            "others have ended, or raise engine.patience where machines start on demand"
        )

    def _hire(self) -> None:
        """Ask the cluster for a worker; where there is no room the request waits, and lets a cluster grow that can."""
        made = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, scheduling_strategy="SPREAD")(
            RayWorker
        )
        handle = made.remote()
        self._members.append(Member(handle, call=handle.where.remote()))

    def _dismiss(self, members: list[Member]) -> None:
        for member in members:
            with contextlib.suppress(Exception):  # it may be gone
                self._ray.kill(member.handle, no_restart=True)
        self._members = [member for member in self._members if member not in members]

    def _tell(self, header: dict[str, Any], tensors: State) -> None:
        """Put broadcasts into the object store, from which each machine fetches them once."""
        if header["do"] == "look at":
            self._objects.pop(self._look or "", None)
            self._look = self._put(tensors)
            return
        fresh = {version: self._put(each) for version, each in grouped(tensors).items()}
        versions = {**self._versions, **fresh}
        self._versions = {version: versions[version] for version in map(str, header["versions"])}
        held = {*self._versions.values(), self._look}
        self._objects = {name: each for name, each in self._objects.items() if name in held}

    def _put(self, tensors: State) -> str:
        self._serial += 1
        name = str(self._serial)
        self._objects[name] = self._ray.put(pack({}, tensors))
        return name

    def _farm(self, requests: Iterable[Message]) -> Iterator[Message]:
        """Give each worker one request at a time; yield the answers in the order of the requests."""
        desk = Desk(requests)
        while True:
            self._staff()
            for member in self._members:
                if member.stage == "idle":
                    number = desk.take(len(self._members))
                    if number is None:
                        break
                    self._ask(member, desk, number)
            message = desk.pop()
            if message is not None:
                yield message
            elif desk.is_done:
                return
            else:
                self._settle()

    def _ask(self, member: Member, desk: Desk, number: int) -> None:
        """Send a request with the broadcasts that the worker has not had."""
        header, tensors = desk.request(number)
        new = [name for name in self._objects if name not in member.known]
        envelope = {
            "request": header,
            "hold": list(self._objects),
            "new": new,
            "versions": self._versions,
            "look": self._look,
        }
        member.known = set(self._objects)
        member.stage, member.desk, member.number = "working", desk, number
        member.call = member.handle.do.remote(pack(envelope, tensors), *(self._objects[name] for name in new))

    def _settle(self, *, opening: bool = False) -> None:
        """Wait until a worker has answered or is lost, for a moment at most, and note what it said."""
        busy = {member.call: member for member in self._members if member.stage != "idle"}
        if not busy:
            time.sleep(BEAT / 10)
            return
        with connected():
            ready, _ = self._ray.wait(list(busy), num_returns=1, timeout=BEAT)
        for call in ready:
            member = busy[call]
            try:
                said = self._ray.get(call)
                header, tensors = ({}, {}) if member.stage == "placing" else unpack(said)
            except self._lost as error:
                self._lose(member, error, opening=opening)
            except self._ray.exceptions.RayTaskError as error:
                cause = " ".join(str(error.cause).split())[:300]
                raise RunError(
                    f"a worker on Ray failed ({type(error.cause).__name__}: {cause}); this is a bug"
                ) from error
            else:
                self._note(member, header, tensors, opening=opening)

    def _note(self, member: Member, header: dict[str, Any], tensors: State, *, opening: bool) -> None:
        """Take what a worker said, and let it go on."""
        match member.stage:
            case "placing":
                member.stage, member.call = "building", member.handle.build.remote(self._data, self._settings)
            case "building" if "error" in header:
                self._dismiss([member])
                self._hires = False
                if opening:
                    raise RunError(header["error"])
                warnings.warn(f"a machine that joined is not used: {header['error']}", stacklevel=2)
            case "building":
                member.stage, member.call = "idle", None
            case _:
                if "error" in header:
                    raise TrainingError(header["error"])
                assert member.desk is not None
                member.desk.answer(member.number, (header, tensors))
                member.stage, member.call, member.desk = "idle", None, None

    def _lose(self, member: Member, error: BaseException, *, opening: bool) -> None:
        """Let what a lost worker was at be done by another."""
        why = in_short(error)
        self._dismiss([member])
        if member.stage == "building" or (member.stage == "placing" and opening):
            raise RunError(
                f"a worker on Ray ended before it could build the job ({why}): is Atoll "
                "installed on every machine, and is there memory for the data of the plan, once for each worker?"
            ) from error
        if member.desk is not None:
            member.desk.give_back(member.number, why)
        self._looked_at = 0.0

    def _staff(self) -> None:
        """Replace workers that were lost, and hire where machines have joined; stop if nobody is left for long."""
        now = time.monotonic()
        if any(member.stage in ("idle", "working", "building") for member in self._members):
            self._seen_alive = now
        elif now - self._seen_alive > self._patience:
            raise RunError(
                f"all workers on Ray were lost, and none found room within {self._patience:g} seconds; the cluster has "
                f"{self._cluster.in_words()}: bring its machines back, then continue with --resume"
            )
        if now - self._looked_at < JOIN_SECONDS or not self._hires:
            return
        self._looked_at = now
        waiting = sum(member.stage == "placing" for member in self._members)
        if self._wanted is not None:
            missing = self._wanted - len(self._members)
        else:
            missing = self._cluster.slots(self._gpus) - waiting
            missing = max(missing, 0 if self._members else 1)
        for _ in range(missing):
            self._hire()
