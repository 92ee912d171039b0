"""Outcomes of one plan as federated and as split learning, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from atoll.core.split import VERTICAL
from atoll.report.main_figure import title_of
from atoll.report.matrix import aligned
from atoll.report.reading import NONE, human_bytes, human_seconds
from atoll.report.spread import figure_text, over_seeds

FEDERATED = "federated"
WAYS = (FEDERATED, "in_turn", "splitfed_v1", "splitfed_v2")
"""What is compared: federated learning of the whole model, and the ways of split learning."""
CENTRAL, ALONE = "central", "alone"
COLUMN_WAYS = (CENTRAL, VERTICAL, ALONE)
"""What is compared where parties hold columns: all columns in one place, vertical learning, and the columns of the
party that holds the labels."""
Status = Literal["done", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class WayRun:
    """One way with one seed; bytes, messages and seconds are those of all clients and rounds."""

    way: str
    seed: int
    status: Status
    why: str = ""
    directory: str = ""
    figure: float | None = None
    """The main figure on the test set at the end."""
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    messages: int = 0
    round_trips: int = 0
    """Round trips that follow one upon another."""
    simulated_seconds: float = 0.0
    """Seconds of messages on links of the table's bandwidth and latency; computing takes none."""
    multiply_adds: int = 0
    """Multiply-adds of a client for one sample, forward and backward."""
    parameter_bytes: int = 0
    activation_bytes: int = 0
    """Bytes of the outputs of a client's layers for one batch."""
    dcor: float | None = None
    """Distance correlation of samples and what the final model sends of them at the cut; None without a cut."""
    psnr: float | None = None
    """Mean PSNR in dB of what a decoder makes of that."""
    psnr_floor: float | None = None
    """Mean PSNR in dB of the mean public sample."""


@dataclass(frozen=True, kw_only=True)
class WaysTable:
    """What was compared, and what came of it."""

    title: str
    metric: str
    seeds: tuple[int, ...]
    bandwidth: float | None
    latency: float | None
    cut: dict[str, Any]
    """What the parts of the cut model are, as in `run.json`."""
    runs: tuple[WayRun, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """What is compared, in order."""
        return tuple(dict.fromkeys(run.way for run in self.runs))

    def of(self, way: str) -> list[WayRun]:
        """Return the runs of a way that have a result."""
        return [run for run in self.runs if run.way == way and run.status == "done" and run.figure is not None]

    @property
    def problems(self) -> list[WayRun]:
        """The runs without a result."""
        return [run for run in self.runs if run.status != "done" or run.figure is None]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return asdict(self)


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("up", "bytes_up", human_bytes),
    ("down", "bytes_down", human_bytes),
    ("messages", "messages", lambda value: f"{value:,.0f}"),
    ("round trips", "round_trips", lambda value: f"{value:,.0f}"),
    ("simulated", "simulated_seconds", human_seconds),
    ("client's multiply-adds a sample", "multiply_adds", lambda value: f"{value / 1e6:.3g} M"),
    ("client's parameters", "parameter_bytes", human_bytes),
    ("client's activations", "activation_bytes", human_bytes),
)
"""Title, field and text of the columns; means over seeds."""
EXPOSED = "at the cut"


def table_rows(table: WaysTable) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table as text, a row for each way."""
    rows = []
    for way in table.ways:
        runs = table.of(way)
        if not runs:
            rows.append([way, *[NONE] * (2 + len(COLUMNS))])
            continue
        figure = figure_text(table.metric, over_seeds([run.figure for run in runs if run.figure is not None]))
        means = (show(over_seeds([getattr(run, field) for run in runs]).mean) for _, field, show in COLUMNS)
        rows.append([way, figure, *means, _exposed(runs)])
    return ["way", f"test {title_of(table.metric)}", *(title for title, _, _ in COLUMNS), EXPOSED], rows


def _exposed(runs: Sequence[WayRun]) -> str:
    """Return distance correlation, and PSNR of inversion beside its floor, as means over seeds."""
    found = [run for run in runs if run.dcor is not None and run.psnr is not None and run.psnr_floor is not None]
    if not found:
        return NONE
    dcor, psnr, floor = (
        over_seeds([getattr(run, name) for run in found]).mean for name in ("dcor", "psnr", "psnr_floor")
    )
    return f"{dcor:.2f}, {psnr:.1f} dB ({floor:.1f})"


def table_text(table: WaysTable) -> str:
    """Return the table and what must be known to read it, for a terminal."""
    head, rows = table_rows(table)
    return "\n".join([aligned([head, *rows]), "", *notes(table)])


EXPOSURE = (
    "At the cut, of the final model: the distance correlation of samples and activations, and the mean PSNR of what a "
    "decoder makes of activations, beside that of the mean public sample, which takes none. Updates of federated "
    "learning are not activations: see atoll redteam."
)


def notes(table: WaysTable) -> list[str]:
    """Return what must be known to read the table, a sentence or two each."""
    seeds, cut = len(table.seeds), table.cut
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "of one seed"
    rate = "without a limit of bandwidth" if table.bandwidth is None else f"of {human_bytes(table.bandwidth)} a second"
    tail = "" if cut["tail"] is None else f" and again before layer {cut['tail']}"
    if "parties" in cut:
        names = ", ".join(f"{party['name']} {party['columns']}" for party in cut["parties"])
        place = (
            f"Columns: {names}; {cut['width']:,} values of each row cross the cuts each way, and {cut['labels']} holds "
            f"the labels. {CENTRAL} has all columns of all rows in one place, {ALONE} those of {cut['labels']}; both "
            "train at home. A client's figures are those of the party with the largest model. "
        )
    else:
        place = f"Split models are cut after layer {cut['after']}{tail}: {cut['width']:,} values of a sample each way. "
    return [
        f"Figures are {over}. Bytes, messages and seconds are those of all clients and rounds.",
        f"Simulated seconds are those of messages on a link for each client, {rate}, with round trips of "
        f"{human_seconds(table.latency or 0.0)}; computing is not counted. Clients at once share no link.",
        *([] if "parties" in cut else [EXPOSURE]),
        f"{place}Multiply-adds are counted in matrix products and convolutions, forward and backward; activations are "
        "the outputs of a client's layers for one batch.",
    ]


def problems_text(problems: Sequence[WayRun]) -> str:
    """Return why runs have no result, one a line."""
    return "\n".join(f"{run.way}, seed {run.seed}, {run.status}: {run.why}" for run in problems)
