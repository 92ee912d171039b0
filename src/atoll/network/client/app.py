"""What an organisation brings to a federation: its samples, its models, and what it insists on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.core.errors import DataError
from atoll.data.dataset import Array, Dataset
from atoll.network.protocol.agreement import NO_FUNCTIONS, Floors, Functions, OwnParts

IDLE_LOAD = 0.5
"""A device with less work waiting than this for each of its processors is idle."""
POWERED = ("Charging", "Full")


def device_attributes(root: Path = Path("/")) -> dict[str, bool | float]:
    """What Linux tells of this device: idle, charging, battery, memory (MB); what it does not tell is left out."""
    found: dict[str, bool | float] = {}
    load, memory = _text(root / "proc/loadavg").split(), _text(root / "proc/meminfo").splitlines()
    if load:
        found["idle"] = float(load[0]) < IDLE_LOAD * (os.cpu_count() or 1)
    for line in memory:
        if line.startswith("MemAvailable:"):
            found["memory"] = float(line.split()[1]) / 1000 * 1.024
    return found | _power(root / "sys/class/power_supply")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientApp:
    """What a client's own module returns; `atoll join --app hospital.app:client` calls that function.

    Samples are laid out as in `Dataset`, and never leave the client.
    """

    train_x: Array
    train_y: Array
    num_classes: int
    scale: float = 1.0
    shift: float = 0.0
    tokens: bool = False
    models: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Models of its own by the names that plans call them, each a function as in the catalogue."""
    algorithms: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Algorithms of its own likewise: each returns an `Algorithm`, of which the client's slots are used."""
    losses: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Losses of its own likewise: each is the function `(outputs, targets) -> one number a sample` itself."""
    works: Functions = field(default_factory=lambda: NO_FUNCTIONS)
    """Client works of its own likewise: each returns a `ClientWork`, e.g. by `atoll.array_work`."""
    floors: Floors = field(default_factory=Floors)
    attributes: Callable[[], Mapping[str, bool | float]] = device_attributes
    """What the device says of itself before it takes work: idle, charging, unmetered, battery, memory."""

    def __post_init__(self) -> None:
        for name in ("train_x", "train_y"):  # how numbers lie in memory must not change what is computed
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name)))
        for kind, functions in self.own_parts._asdict().items():
            for name, function in functions.items():
                if not callable(function):
                    raise DataError(f"{kind}['{name}'] of the app is {function!r}: give the function that makes it")
        self.dataset()

    @property
    def own_parts(self) -> OwnParts:
        """What plans may name beside the catalogue."""
        return OwnParts(self.models, self.algorithms, self.losses, self.works)

    def current_attributes(self) -> dict[str, bool | float]:
        """What the device says of itself now."""
        try:
            return {
                str(k): bool(v) if isinstance(v, bool | np.bool_) else float(v) for k, v in self.attributes().items()
            }
        except Exception as error:
            raise DataError(
                f"the app's attributes failed with {type(error).__name__}: {error}; they are true or false, or numbers"
            ) from error

    def dataset(self) -> Dataset:
        """The samples, checked; nothing is tested here, so that one sample stands for the test set."""
        return Dataset(
            name="own samples",
            train_x=self.train_x,
            train_y=self.train_y,
            test_x=self.train_x[:1],
            test_y=self.train_y[:1],
            num_classes=self.num_classes,
            scale=self.scale,
            shift=self.shift,
            tokens=self.tokens,
        )


def _power(folder: Path) -> dict[str, bool | float]:
    """Whether power comes in, and how full the emptiest battery is; a device without batteries is plugged in."""
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
