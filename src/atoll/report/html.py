"""The report: one self-contained HTML file about one run, or about several."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args

from atoll.core.errors import RunError
from atoll.report import figures
from atoll.report.codecs import codec_picture, codec_table, codecs_of
from atoll.report.compare import comparison
from atoll.report.main_figure import LOSSES, MEASURES, SHARES, main_figure, measure_title
from atoll.report.reading import AXES, Against, RunRecord, labels, number, read_run, series
from atoll.report.run_sections import cards, lead, run_pictures, run_section, warnings
from atoll.report.shell import image, read_packaged, shell


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write one HTML file about the runs, by default `DIR/report.html` for one run, `./report.html` for several."""
    if not run_dirs:
        raise RunError("no run was given: name at least one run directory, as in: atoll report DIR")
    records = [read_run(run) for run in run_dirs]
    if out is None:
        out = records[0].path if len(records) == 1 else Path()
    out = out / "report.html" if out.is_dir() else out
    return figures.write_whole(out, page(records).encode("utf-8", "replace"))


def export_png(run_dirs: Sequence[Path], out_dir: Path) -> list[Path]:
    """Write every figure of the runs as a PNG file into a directory, and return the files."""
    if not run_dirs:
        raise RunError("no run was given: name at least one run directory, as in: atoll report DIR --png OUT")
    records = [read_run(run) for run in run_dirs]
    written = [
        figures.save_png(figures.curves(records, against), out_dir / f"curves-{against}.png")
        for against in _axes(records)
    ]
    if codecs_of(records):
        written.append(figures.save_png(codec_picture(records), out_dir / "codecs.png"))
    for record, slug in zip(records, _slugs(labels(records)), strict=True):
        prefix = f"{slug}-" if len(records) > 1 else ""
        for picture in run_pictures(record):
            written.append(figures.save_png(picture.draw(), out_dir / f"{prefix}{picture.name}.png"))
    return written


def page(records: Sequence[RunRecord]) -> str:
    """Return the report as HTML text."""
    names, single = labels(records), len(records) == 1
    list_of_names = ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
    top = (warnings(records[0]) + cards(records[0])) if single else comparison(records, names) + _codecs(records)
    static_curves = image(figures.curves(records), "Main figure and loss by round")
    body = [
        top,
        read_packaged("curves.html").replace("{{still}}", static_curves),
        *(
            run_section(record, name, index, single)
            for index, (record, name) in enumerate(zip(records, names, strict=True))
        ),
        f'<script type="application/json" id="atoll-data">{_data(records, names)}</script>',
    ]
    return shell(
        brand="Atoll report",
        heading=names[0] if single else f"{len(records)} runs compared",
        lead=lead(records[0]) if single else list_of_names,
        body="\n".join(body),
        script=read_packaged("page.js"),
    )


def _codecs(records: Sequence[RunRecord]) -> str:
    """Return the section about codecs with its figure, or "" if the runs have the same codecs."""
    table = codec_table(records)
    return table.replace("</section>", f"{image(codec_picture(records), 'Accuracy against bytes')}</section>")


def _data(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return the curves for the page's script, as JSON that cannot close its script element."""
    measures = _measures(records)
    runs = [
        {
            "label": name,
            "x": {axis: [_rounded(number(row, key), axis) for row in record.rows] for axis, key in AXES.items()},
            "y": {key: [_rounded(number(row, key)) for row in record.rows] for key in [*measures, *LOSSES]},
        }
        for record, name in zip(records, names, strict=True)
    ]
    titles = [{"key": key, "title": title} for key, title in measures.items()]
    short = {key: key.split(".")[-1].replace("_", " ") for key in measures} | LOSSES
    main = main_figure(records)
    shares = [key for key in measures if (key.split(".")[1] if key.startswith("test.") else main) in SHARES]
    table = {"runs": runs, "measures": titles, "names": short, "shares": shares}
    text = json.dumps(table, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _measures(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the curves that can be drawn, keys of metrics rows and titles, those of the test set first."""
    names = dict.fromkeys(name for record in records for row in record.rows for name in row.get("test") or {})
    tested = (f"test.{name}" for name in names if name != "loss")
    known = {**{key: measure_title(key) for key in tested}, **MEASURES}
    return {key: title for key, title in known.items() if any(series(record, key)[0] for record in records)}


def _rounded(value: float | None, axis: str = "") -> float | None:
    if value is None or axis == "round":
        return None if value is None else int(value)
    return float(f"{value / 1e6 if axis == 'bytes' else value:.6g}")


def _axes(records: Sequence[RunRecord]) -> list[Against]:
    """Return the axes on which some run advances; in some simulations nothing is sent, and bytes stay 0."""
    axes: tuple[Against, ...] = get_args(Against)
    advancing = [axis for axis in axes if any(a < b for r in records for a, b in pairwise(series(r, "round", axis)[0]))]
    return advancing or ["round"]


def _slugs(names: Sequence[str]) -> list[str]:
    """Return unique file names for runs, of lower-case letters, digits and hyphens."""
    slugs: list[str] = []
    for index, name in enumerate(names, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or f"run-{index}"
        slugs.append(f"{slug}-{index}" if slug in slugs else slug)
    return slugs
