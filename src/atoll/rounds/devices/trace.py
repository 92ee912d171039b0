"""Devices from a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from atoll.core.devices import Devices, Load, Speed, Trip, trip
from atoll.core.errors import PlanError
from atoll.core.options import Seed
from atoll.core.seeds import derive

REQUIRED = Speed._fields
"""Columns that every row must have, with values above 0."""
OPTIONAL = {"dropout": 0.0, "from_hour": 0.0, "to_hour": 24.0, "battery": math.nan, "memory": math.nan}
"""Columns that may be missing, with their defaults."""


EXAMPLE = {"path": "devices.csv"}


def trace(path: str, seed: Seed = 0) -> Devices:
    """Read devices from a CSV file, one per row; the seed assigns one of them to each client.

    Columns: samples_per_second, down_mbps, up_mbps (Mbit/s), and optionally dropout (a share), from_hour and to_hour
    (the hours in which it can be reached, 0 to 24, across midnight if from_hour is later), battery (a share) and memory
    (MB).
    """
    rows = _read(Path(path))

    def row(client: int) -> dict[str, float]:
        return rows[derive(seed, "device row", client) % len(rows)]

    def speed(client: int) -> Speed:
        return Speed(*(row(client)[name] for name in REQUIRED))

    def trips(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
        return [trip(load, speed(load.client), row(load.client)["dropout"], rng) for load in loads]

    def reachable(client: int, seconds: float) -> bool:
        hour, start, end = seconds / 3600 % 24, row(client)["from_hour"], row(client)["to_hour"]
        return start <= hour < end if start <= end else hour >= start or hour < end

    def attributes(client: int, seconds: float) -> Mapping[str, float | bool]:
        optional = {name: row(client)[name] for name in ("battery", "memory")}
        is_free = reachable(client, seconds)
        stated = {name: value for name, value in optional.items() if not math.isnan(value)}
        return {"idle": is_free, "charging": is_free, "unmetered": is_free, **stated}

    return Devices(trips, reachable=reachable, attributes=attributes)


def _read(path: Path) -> list[dict[str, float]]:
    try:
        with path.open(newline="") as file:
            table = list(csv.DictReader(file))
    except OSError as error:
        raise PlanError(f"the trace '{path}' cannot be read ({error.strerror}): check devices.path") from error
    if not table:
        raise PlanError(f"the trace {path} has no rows: give a line of column names and at least one device")
    missing = [name for name in REQUIRED if name not in table[0]]
    unknown = [name for name in table[0] if name not in (*REQUIRED, *OPTIONAL)]
    if missing or unknown:
        raise PlanError(
            f"the trace {path} lacks columns {missing} or has unknown ones {unknown}: "
            f"it needs {', '.join(REQUIRED)} and may have {', '.join(OPTIONAL)}"
        )
    return [_numbers(line, number, path) for number, line in enumerate(table, 2)]


def _numbers(line: dict[str, str], number: int, path: Path) -> dict[str, float]:
    try:
        values = {name: float(value) for name, value in line.items() if value not in ("", None)}
    except (TypeError, ValueError) as error:
        raise PlanError(f"{path}, line {number}: {error}; every field must be a number") from error
    for name in REQUIRED:
        if not 0 < values.get(name, 0.0) < math.inf:
            raise PlanError(f"{path}, line {number}: {name} must be a number above 0, got {line[name]!r}")
    if not 0 <= values.get("dropout", 0.0) < 1:
        raise PlanError(f"{path}, line {number}: dropout must be a share in [0, 1), got {line['dropout']!r}")
    return {**OPTIONAL, **values}
