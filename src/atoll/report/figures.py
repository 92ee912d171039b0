"""Figures of runs, drawn with matplotlib without a display. Shapes: C clients, K classes."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import RunError
from atoll.report.main_figure import SHARES, SMALLER_IS_BETTER, main_figure, shown, title_of
from atoll.report.reading import Against, RunRecord, class_names, labels, series
from atoll.train.metrics import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from atoll.report.notebook import Picture

Array = np.ndarray[Any, np.dtype[Any]]

THEME = {
    "ink": ("#1d2935", "#e6edf3"),
    "muted": ("#5d6c7b", "#98a7b5"),
    "line": ("#dbe2e8", "#2b3743"),
    "paper": ("#ffffff", "#141c24"),
    "ground": ("#f4f7f9", "#0c1218"),
    "c0": ("#0072b2", "#4fa8e0"),
    "c1": ("#d55e00", "#ff8b45"),
    "c2": ("#009e73", "#35c79b"),
    "c3": ("#c0609a", "#e79fc8"),
    "c4": ("#c98500", "#f0b93a"),
    "c5": ("#3fa7de", "#93d4f7"),
    "c6": ("#6b58b0", "#a99bea"),
}
"""Name -> colour in light and in dark mode, after Okabe and Ito (colour-blind safe); pages and figures share them."""

INK, MUTED, LINE = (THEME[name][0] for name in ("ink", "muted", "line"))
PALETTE = tuple(light for name, (light, _) in THEME.items() if re.fullmatch(r"c\d", name))
DASHES = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)))
HEAT = (0.125, 0.475, 0.78)
"""Colour of heat maps as red, green and blue in [0, 1]."""

STYLE: Any = {
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "atoll",
}

MOST_BUBBLES = 900
"""Maximum number of cells that are drawn as circles; more become a heat map."""


@contextmanager
def plot_style() -> Iterator[None]:
    """Set matplotlib's style while a figure is drawn or saved, and silence warnings about missing glyphs."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def new_figure(width: float, height: float) -> Picture:
    """Create an empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from atoll.report.notebook import Picture

    figure = Picture(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    return figure


def plain(text: str, most: int = 60) -> str:
    r"""Return text that matplotlib draws literally: without formulas and control characters, cut to `most` letters.

    >>> plain("cost $5\n")
    'cost \\$5↵'
    """
    visible = "".join(_visible(letter) for letter in text)
    short = visible if len(visible) <= most else visible[: most - 1] + "…"
    return short.replace("$", r"\$")


def _visible(letter: str) -> str:
    return {"\n": "↵", "\t": "⇥"}.get(letter, letter if letter.isprintable() else "\ufffd")


def class_label(name: str) -> str:
    """Return the name of a class for an axis, with a visible blank."""
    return "␣" if name == " " else plain(name, 16)


def curves(records: Sequence[RunRecord], against: Against = "round") -> Picture:
    """Draw main figure and loss of several runs, one colour for each; the training loss is a thin dotted line."""
    with plot_style():
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        figure = new_figure(10.5, 4.2 + 0.2 * ((len(records) + 2) // 3))
        main, loss = figure.subplots(1, 2)
        name = main_figure(records)
        unit, per_unit = _unit(records, against)
        handles = []
        for index, (record, label) in enumerate(zip(records, labels(records), strict=True)):
            look: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)]}
            dash = DASHES[index // len(PALETTE) % len(DASHES)]
            for panel, measure in ((main, f"test.{name}"), (loss, "test.loss")):
                xs, ys = series(record, measure, against)
                marker = "o" if len(xs) <= 30 else ""
                xs = [x / per_unit for x in xs]
                (line,) = panel.plot(xs, ys, ls=dash, lw=1.9, marker=marker, ms=3.5, label=plain(label), **look)
                handles += [line] if panel is main else []
            xs, ys = series(record, "train_loss", against)
            loss.plot([x / per_unit for x in xs], ys, lw=1.1, ls=":", **look)
        if name in SHARES:
            main.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        main.set_title(f"Test {title_of(name)}")
        loss.set_title("Loss: test (line), training (dotted)")
        for panel in (main, loss):
            panel.set_xlabel(unit)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=against == "round"))
            panel.grid(axis="y")
            panel.tick_params(length=0)
            note_if_empty(panel)
        figure.legend(handles=handles, loc="outside lower left", ncols=3, labelcolor=INK, fontsize=9)
    return figure


def note_if_empty(panel: Axes, text: str = "not measured") -> None:
    """Write a text into a panel that has no points."""
    if not any(len(line.get_xdata()) for line in panel.lines):  # type: ignore[arg-type]
        panel.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=panel.transAxes)
        panel.set(xticks=[], yticks=[])


def _unit(records: Sequence[RunRecord], against: Against) -> tuple[str, float]:
    """Return the label of the x axis, and the divisor that makes its numbers readable."""
    if against == "round":
        return "Round", 1
    largest = max((x for record in records for x in series(record, "round", against)[0]), default=0)
    if against != "bytes":
        time = "Wall time" if against == "seconds" else "Simulated time"
        return (f"{time} (h)", 3600) if largest >= 7200 else (f"{time} (s)", 1)
    return ("Uplink, all clients (GB)", 1e9) if largest >= 1e10 else ("Uplink, all clients (MB)", 1e6)


def partition_picture(counts_CK: Array, class_names: Sequence[str], title: str, num_clients: int) -> Figure:
    """Draw the number of samples by client and class, with the totals of clients above and of classes beside.

    Counts are areas of circles, or a heat map for many clients or classes. Classes without names are numbered.
    """
    counts_CK = np.asarray(counts_CK)
    C, K = counts_CK.shape
    names = class_names if len(class_names) == K else [str(k) for k in range(K)]
    with plot_style():
        height = float(np.clip(0.27 * K, 2.0, 8.5))
        figure = new_figure(10.5, height + 2.1)
        grid = figure.add_gridspec(2, 3, height_ratios=(1, height), width_ratios=(8, 1, 0.12))
        main = figure.add_subplot(grid[1, 0])
        above = figure.add_subplot(grid[0, 0], sharex=main)
        beside = figure.add_subplot(grid[1, 1], sharey=main)
        if C * K <= MOST_BUBBLES:
            legend = _bubbles(main, counts_CK, height)
        else:
            legend = _heat(main, figure.add_subplot(grid[1, 2]), counts_CK)
        above.bar(range(C), counts_CK.sum(1), width=0.8 if C <= 60 else 1.0, color=PALETTE[0], lw=0)
        beside.barh(range(K), counts_CK.sum(0), height=0.8, color=PALETTE[0], lw=0)
        shown = f"{C:,} clients" if num_clients <= C else f"only the first {C:,} of {num_clients:,} clients are shown"
        figure.suptitle(plain(title, 90), x=0.01, ha="left", fontsize=12, fontweight="bold")
        above.set_title(f"{shown}; {legend}", fontsize=9.5, fontweight="normal", color=MUTED)
        above.set_ylabel("samples", fontsize=8.5)
        beside.set_xlabel("samples", fontsize=8.5)
        main.set(xlim=(-0.6, C - 0.4), ylim=(K - 0.4, -0.6), xlabel="client", ylabel="class")
        step = -(-C // 25)
        main.set_xticks(range(0, C, step), [str(c) for c in range(0, C, step)])
        _class_ticks(main.set_yticks, names, K)
        for panel in (main, above, beside):
            panel.tick_params(length=0)
        above.tick_params(labelbottom=False, labelsize=8)
        beside.tick_params(labelleft=False, labelsize=8)
        above.locator_params(axis="y", nbins=2)
        beside.locator_params(axis="x", nbins=1)
    return figure


def _class_ticks(set_ticks: Any, names: Sequence[str], K: int, **look: Any) -> None:
    step = -(-K // 100)
    size = 9 if K <= 30 else 7 if K <= 55 else 6.4
    set_ticks(range(0, K, step), [class_label(names[k]) for k in range(0, K, step)], fontsize=size, **look)


def _bubbles(panel: Axes, counts_CK: Array, height: float) -> str:
    """Draw counts as circles, and return what their area means."""
    C, K = counts_CK.shape
    largest = max(counts_CK.max(), 1)
    diameter = 0.92 * min(8.4 * 72 / C, height * 72 / K, 40)
    client, label = np.nonzero(counts_CK)
    area = np.maximum(diameter**2 * counts_CK[client, label] / largest, 0.8)
    panel.scatter(client, label, s=area, color=PALETTE[0], lw=0)
    panel.set_yticks(np.arange(K - 1) + 0.5, minor=True)
    panel.grid(axis="y", which="minor")
    panel.tick_params(which="minor", length=0)
    return f"the area of a circle is the number of samples, the largest is {largest:,}"


def heat_ramp() -> Colormap:
    """Return a colour map from transparent to blue, which suits a white and a black background."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("atoll", [(0, (*HEAT, 0.0)), (0.002, (*HEAT, 0.08)), (1, (*HEAT, 1.0))])


def _heat(panel: Axes, bar: Axes, counts_CK: Array) -> str:
    """Draw counts as a heat map, and return what its colour means."""
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=max(float(counts_CK.max()), 1.0))
    image = panel.imshow(counts_CK.T, cmap=heat_ramp(), norm=norm, aspect="auto", interpolation="none")
    colour_bar(image, "samples of a class", cax=bar)
    return "colour is the number of samples of a class"


def colour_bar(image: Any, label: str, **options: Any) -> None:
    """Add a colour bar to an image; `options` are those of matplotlib's colorbar."""
    bar = image.figure.colorbar(image, **options)
    bar.set_label(label, fontsize=8.5, color=MUTED)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)


def client_spread(record: RunRecord) -> Figure:
    """Draw the main figures of clients from worst to best, and their histogram."""
    if record.clients is None:
        raise RunError(
            f"{record.path} has no clients.json: clients were not evaluated; set evaluation.clients_every to 1 or more"
        )
    name = record.clients.get("metric", "accuracy")
    falling, share = name in SMALLER_IS_BETTER, name in SHARES
    main_C = np.sort(np.asarray([value for value in record.clients[name] if value is not None], dtype=float))
    if not len(main_C):
        raise RunError(f"{record.path}: no client has a {title_of(name)}; name another figure in evaluation.metrics")
    main_C = main_C[::-1] if falling else main_C
    C = len(main_C)
    tenth = max(1, C // 10)
    stats = spread(main_C, np.zeros(1), larger_is_better=not falling)
    with plot_style():
        from matplotlib.ticker import PercentFormatter

        figure = new_figure(10.5, 3.9)
        ranked, histogram = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        rank_C = np.arange(C) + 0.5
        for part, colour in ((slice(0, tenth), PALETTE[1]), (slice(tenth, C), PALETTE[0])):
            ranked.bar(rank_C[part], main_C[part], width=0.82 if C <= 120 else 1.0, color=colour, lw=0)
        bins = np.linspace(0, 1, 21) if share else np.linspace(main_C.min(), main_C.max() + 1e-12, 21)
        num_in_bin, _ = np.histogram(main_C, bins)
        step = bins[1] - bins[0]
        histogram.barh(bins[:-1] + step / 2, num_in_bin, height=0.86 * step, color=PALETTE[0], lw=0)
        worst = ("mean of the worst tenth", stats["worst_decile"], PALETTE[1], (0, (5, 2)))
        for kind, value, colour, dash in (("mean", stats["mean"], INK, "-"), worst):
            for panel in (ranked, histogram):
                panel.axhline(value, color=colour, lw=1.3, ls=dash, label=f"{kind}: {shown(name, value)}")
        if share:
            ranked.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        when = f" after round {record.clients['round']}" if isinstance(record.clients.get("round"), int) else ""
        title = title_of(name)
        ranked.set_title(f"{title[0].upper() + title[1:]} of {C:,} client{'s' * (C != 1)}{when}, on their own data")
        ranked.set(xlabel="clients, from worst to best", xlim=(0, C), **({"ylim": (0, 1.02)} if share else {}))
        histogram.set(xlabel="clients")
        histogram.set_title("Histogram")
        histogram.xaxis.get_major_locator().set_params(integer=True, nbins=4)
        for panel in (ranked, histogram):
            panel.grid(axis="y")
            panel.tick_params(length=0)
        handles, names = ranked.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=2, labelcolor=INK, fontsize=9)
    return figure


def confusion(record: RunRecord) -> Figure:
    """Draw the confusion matrix: each row is a true class, and its cells are the shares of the predicted classes."""
    if record.confusion is None:
        raise RunError(
            f"{record.path} has no confusion.json: the model was not tested; set evaluation.every to 1 or more"
        )
    matrix_KK = np.asarray(record.confusion["matrix"], dtype=float)
    share_KK = matrix_KK / np.maximum(matrix_KK.sum(1, keepdims=True), 1)
    K = len(matrix_KK)
    names = class_names(record, K)
    with plot_style():
        from matplotlib.colors import PowerNorm
        from matplotlib.ticker import PercentFormatter

        side = float(np.clip(0.62 * K, 5.0, 9.0))
        figure = new_figure(side + 1.2, side + 0.6)
        panel = figure.subplots()
        norm = PowerNorm(0.5, vmin=0, vmax=1)
        image = panel.imshow(share_KK, cmap=heat_ramp(), norm=norm, interpolation="none")
        shares = PercentFormatter(1.0, symbol=" %")
        colour_bar(image, "share of the true class", ax=panel, pad=0.02, fraction=0.03, aspect=30, format=shares)
        when = f" after round {record.confusion['round']}" if isinstance(record.confusion.get("round"), int) else ""
        panel.set_title(f"Confusion{when}, in % of each true class")
        panel.set(xlabel="predicted class", ylabel="true class")
        fits = 6.2 * min(max(map(len, names)), 16) <= 72 * side / K
        _class_ticks(panel.set_yticks, names, K)
        _class_ticks(panel.set_xticks, names, K, rotation=0 if fits else 90)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        for row, column in np.argwhere(share_KK >= 0.0005) if K <= 15 else ():
            share = share_KK[row, column]
            panel.text(
                column, row, f"{100 * share:.1f}", ha="center", va="center", fontsize=8.5,
                color="white" if share > 0.3 else INK,
            )  # fmt: skip
    return figure


def save_png(figure: Figure, path: Path | str, dpi: int = 150) -> Path:
    """Write a figure as a PNG file, atomically."""
    buffer = io.BytesIO()
    with plot_style():
        figure.savefig(buffer, format="png", dpi=dpi)
    return write_whole(Path(path), buffer.getvalue())


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG text that follows the reader's light or dark scheme and fonts."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with plot_style():
        figure.savefig(buffer, format="svg", facecolor="none", metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans'", "system-ui, sans-serif")
    for name, (light, _) in THEME.items():
        if name not in ("paper", "ground"):
            svg = svg.replace(light, f"var(--{name})")
    opening, rest = svg.split(">", 1)
    return f"{opening}><style>{theme_css('svg')}</style>{rest}"


def theme_css(selector: str) -> str:
    """Return the colours as CSS variables, in light and in dark mode."""
    light, dark = (";".join(f"--{name}:{pair[side]}" for name, pair in THEME.items()) for side in (0, 1))
    return f"{selector}{{{light}}}@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically: first to a temporary file beside it, which then replaces it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; choose another place, or free disk space and check the "
            "permissions"
        ) from error
    return path
