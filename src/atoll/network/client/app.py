"""What an organisation supplies as a client: samples, models of its own, and floors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import DataError, PlanError
from atoll.data.dataset import Dataset
from atoll.data.rows import Rows, is_lazy
from atoll.data.targets import CLASSIFICATION, Array
from atoll.network.protocol.agreement import ANY, NO_FUNCTIONS, Floors, Functions, OwnParts
from atoll.network.protocol.bases import NO_BASES
from atoll.train.array_work import Evaluate, Train, array_work
from atoll.train.devices import CPU, Place, settled

IDLE_LOAD = 0.5
"""Load per processor below which a device is idle."""
POWERED = ("Charging", "Full")


def device_attributes(root: Path = Path("/")) -> dict[str, bool | float]:
    """Return what Linux knows of this device: idle, charging, battery, memory (MB); leave out what it does not."""
    known: dict[str, bool | float] = {}
    load, memory = _text(root / "proc/loadavg").split(), _text(root / "proc/meminfo").splitlines()
    if load:
        known["idle"] = float(load[0]) < IDLE_LOAD * (os.cpu_count() or 1)
    for line in memory:
        if line.startswith("MemAvailable:"):
            known["memory"] = float(line.split()[1]) / 1000 * 1.024
    return known | _power(root / "sys/class/power_supply")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientApp:
    """What a client's own function returns, which `atoll join --app hospital.app:client` calls.

    Samples have the layout of `Dataset`, and never leave the client.
    """

    train_x: Array | Rows
    train_y: Array | None = None
    """Targets; left out by a party of vertical learning that has none."""
    num_classes: int = 0
    scale: float = 1.0
    shift: float = 0.0
    tokens: bool = False
    problem: str = ""
    """The kind of problem that the targets are for; inferred if left out, unless the plan says it."""
    columns: tuple[str, ...] = ()
    """In vertical learning, names of the features of `train_x`, in its order, as the server's data have them; left out
    if that is the order of the server's data."""
    rows: str | Path | bytes | None = None
    """In vertical learning, what commits to the rows in their order: the table that `atoll align` wrote, or 32 bytes
    that all parties make alike."""
    models: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Own models by the names that plans use, each a function as in the catalogue."""
    algorithms: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Own algorithms likewise: functions that return an `Algorithm`, of which the client's slots are used."""
    losses: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Own losses likewise: each is itself the function `(outputs, targets) -> one number a sample`."""
    works: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Own client works likewise: functions that return a `ClientWork`, e.g. by `atoll.array_work`."""
    bases: Mapping[str, str | Path] = field(default_factory=lambda: NO_BASES)
    """Directories of base models on this machine, by the names that plans of language models use."""
    first: Callable[[Any], Mapping[str, Any]] | None = None
    """With `train` and `evaluate`: what this client does for plans whose work is in no catalogue, as `array_work`."""
    train: Train | None = None
    evaluate: Evaluate | None = None
    floors: Floors = field(default_factory=Floors)
    device: str = CPU
    """Where models are trained: "cpu", "cuda", "cuda:1", "mps", or "auto" for the first accelerator that is there."""
    attributes: Callable[[], Mapping[str, bool | float]] = device_attributes
    """Returns the state of the device: idle, charging, unmetered, battery, memory."""

    def __post_init__(self) -> None:
        for name in ("train_x", "train_y"):  # the memory layout must not change results
            if getattr(self, name) is not None and not is_lazy(getattr(self, name)):
                object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name)))
        given = [name for name in ("first", "train", "evaluate") if getattr(self, name) is not None]
        if len(given) not in (0, 3):
            raise DataError(f"the app has {' and '.join(given)} only: give first, train and evaluate together")
        object.__setattr__(self, "bases", {name: _base(name, path) for name, path in self.bases.items()})
        for kind in ("models", "algorithms", "losses", "works"):
            for name, function in getattr(self, kind).items():
                if not callable(function):
                    raise DataError(f"{kind}['{name}'] of the app is {function!r}: give the function that makes it")
        self.place()
        self.dataset()

    def place(self) -> Place:
        """Return the device; PlanError if it is not there."""
        try:
            return settled(Place(self.device))
        except PlanError as error:
            raise PlanError(f"the app's device: {error}".replace("engine.device", "device")) from error

    @property
    def own_parts(self) -> OwnParts:
        """Return the parts that plans may name beside the catalogue."""
        works = self.works
        if self.first is not None and self.train is not None and self.evaluate is not None:
            work = array_work(first=self.first, train=self.train, evaluate=self.evaluate)
            works = {**works, ANY: lambda **options: work}
        bases = {name: str(path) for name, path in self.bases.items()}
        return OwnParts(self.models, self.algorithms, self.losses, works, bases)

    def current_attributes(self) -> dict[str, bool | float]:
        """Return the current state of the device."""
        try:
            return {
                str(k): bool(v) if isinstance(v, bool | np.bool_) else float(v) for k, v in self.attributes().items()
            }
        except Exception as error:
            raise DataError(
                f"the app's attributes failed with {type(error).__name__}: {error}; they are true or false, or numbers"
            ) from error

    def dataset(self) -> Dataset:
        """Return the samples, checked; as a client tests nothing, one sample stands for the test set.

        Where there are no targets, zeros stand for them.
        """
        has_targets = self.train_y is not None
        targets = np.zeros(len(self.train_x), dtype=np.int64) if self.train_y is None else self.train_y
        return Dataset(
            name="own samples",
            train_x=self.train_x,
            train_y=targets,
            test_x=np.asarray(self.train_x[np.arange(1)]),
            test_y=targets[:1],
            num_classes=self.num_classes if has_targets else 2,
            scale=self.scale,
            shift=self.shift,
            tokens=self.tokens,
            problem=self.problem if has_targets else CLASSIFICATION,
        )


def _base(name: str, path: str | Path) -> str:
    """Return the full path of a base, which no hub and no change of directory turns into something else."""
    if not (Path(path) / "config.json").is_file():
        raise DataError(
            f"the base {name!r} should lie in {str(path)!r}, where there is no config.json: give the directory of a "
            "model on this machine; a name on the hub is not taken"
        )
    return str(Path(path).resolve())


def _power(folder: Path) -> dict[str, bool | float]:
    """Return whether the device has power, and the level of its emptiest battery; without batteries it has power."""
    supplies = sorted(folder.iterdir()) if folder.is_dir() else []
    batteries = [each for each in supplies if _text(each / "type") == "Battery"]
    if not batteries:
        return {"charging": True} if folder.is_dir() else {}
    plugged = any(_text(each / "online") == "1" for each in supplies)
    charging = plugged or all(_text(each / "status") in POWERED for each in batteries)
    levels = [float(level) / 100 for each in batteries if (level := _text(each / "capacity"))]
    return {"charging": charging, **({"battery": min(levels)} if levels else {})}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
