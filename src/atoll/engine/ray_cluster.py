"""The connection to a Ray cluster, for the engine and for grids of runs."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from atoll.core.errors import PlanError, RunError
from atoll.core.options import at_least

Address = str
"""`auto`: the cluster of RAY_ADDRESS, or the one that runs on this machine; `local`: one of this process alone;
`HOST:PORT` or `ray://HOST:PORT`: that cluster."""
Gpus = Annotated[float, at_least(0, "0 is none, and 0.5 lets two workers share one")]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NAMED = re.compile(r"[A-Za-z_.]*(Error|Exception|Exit|Interrupt)\b")
LOCAL = "local"
INSTALL = "needs Ray: pip install 'atoll[ray]', on every machine of the cluster"


class Cluster(NamedTuple):
    """A connection to a cluster."""

    ray: Any
    """The module."""
    ours: bool
    """Whether this connection was opened here, so that it is closed here; a cluster of this process ends with it."""

    def slots(self, gpus: float = 0.0, *, free: bool = True) -> int:
        """Return how many workers of one CPU and so many GPUs have room, beside all others or if there were none."""
        there = self.ray.available_resources() if free else self.ray.cluster_resources()
        num: int = math.floor(there.get("CPU", 0.0) + 1e-6)
        return min(num, math.floor(there.get("GPU", 0.0) / gpus + 1e-6)) if gpus else num

    def in_words(self) -> str:
        """Say what the cluster has, and what of it is free."""
        alive = sum(node["Alive"] for node in self.ray.nodes())
        all_of_it, free = self.ray.cluster_resources(), self.ray.available_resources()
        each = [f"{all_of_it.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
        return f"{alive} node{'s' if alive != 1 else ''} with {' and '.join(each)}"

    def close(self) -> None:
        """Disconnect, if this connection was opened here."""
        if self.ours:
            with restored_signals():
                self.ray.shutdown()


def connect(address: Address, *, what: str, cpus: int | None = None, working_dir: str = "") -> Cluster:
    """Connect to a cluster, or begin one of this process with so many CPUs if the address is `local`.

    A process that is connected already stays so, whatever the address says. `what` needs Ray, for error texts.
    """
    if address == LOCAL and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        # Ray listens on all addresses of a machine, and takes work from whoever has this token
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise PlanError(f"{what} {INSTALL}") from error
    if ray.is_initialized():
        if working_dir:
            raise PlanError(
                f"working_dir is '{working_dir}', but this process is connected to Ray already: give it to your own "
                "ray.init as runtime_env, and leave it out here"
            )
        return Cluster(ray, ours=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to the makers of Ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if working_dir:
        if not os.path.isdir(working_dir):
            raise PlanError(f"working_dir is '{working_dir}', which is no directory: name one, e.g. '.'")
        options["runtime_env"] = {"working_dir": working_dir}
    if address == LOCAL:
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        with restored_signals():
            ray.init(address=address, **options)
    except Exception as error:  # Ray has no common base of what its start-up raises
        raise RunError(
            f"there is no Ray cluster at '{address}' ({in_short(error)}): start one with `ray start "
            "--head`, name another address, or set address to 'local' for workers on this machine alone"
        ) from error
    return Cluster(ray, ours=True)


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Keep this process's own handlers of signals, of which Ray replaces some."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Turn the loss of the cluster into an error that says how to go on."""
    try:
        yield
    except ConnectionError as error:
        raise RunError(
            f"the connection to the Ray cluster is lost ({in_short(error)}): see that its head is up and can be "
            "reached, or run on a machine of the cluster instead of ray://; then continue with --resume"
        ) from error


def why_lost(ray: Any) -> tuple[type[BaseException], ...]:
    """Return what Ray raises where a worker, its machine or what it answered is gone."""
    errors = ray.exceptions
    return (
        errors.RayActorError,
        errors.ActorUnschedulableError,
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.ObjectLostError,
        errors.OutOfMemoryError,
    )


def in_short(error: BaseException) -> str:
    """Return what lies behind an error of Ray in one line: the last exception that its text names.

    >>> in_short(RuntimeError("the actor died: see\\n  File x\\nModuleNotFoundError: No module named 'atoll'\\n ^^^"))
    "ModuleNotFoundError: No module named 'atoll'"
    """
    lines = [COLOUR.sub("", line).strip() for line in str(error).splitlines()]
    named = [line for line in lines if NAMED.match(line)]
    return f"{type(error).__name__}: {' '.join(' '.join(lines).split())[:300]}" if not named else named[-1][:300]
