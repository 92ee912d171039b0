"""Every figure draws what it should, for small and for large federations, and leaves matplotlib as it was."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from atoll.core.errors import RunError
from atoll.report.figures import (
    THEME,
    client_spread,
    confusion,
    curves,
    partition_picture,
    plain,
    save_png,
    to_svg,
    write_whole,
)
from atoll.report.reading import read_run


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}  # type: ignore[attr-defined]


def ink(path: Path) -> float:
    """The share of a picture that is not white, after a check that it is a picture of some size and colour."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert image.format == "PNG" and min(image.size) >= 150
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) >= 20
    return float((pixels < 250).any(axis=2).mean())


def test_curves_overlay_runs(mnist: Path, million: Path, untested: Path, tmp_path: Path) -> None:
    figure = curves([read_run(run) for run in (mnist, million, untested)], "bytes")
    accuracy, loss = figure.axes
    assert [len(line.get_xdata()) for line in accuracy.lines] == [20, 20, 0]
    assert len(loss.lines) == 6
    assert accuracy.lines[0].get_xdata()[-1] == pytest.approx(159.368)  # type: ignore[index]
    assert {"mnist-shards", "a million", "untested", "Uplink, all clients (MB)"} <= texts(figure)
    assert 0.01 < ink(save_png(figure, tmp_path / "curves.png", dpi=60)) < 0.5


def test_curves_say_what_was_not_measured(untested: Path) -> None:
    assert "not measured" in texts(curves([read_run(untested)]))


@pytest.mark.parametrize(("num_clients", "num_classes"), [(5, 2), (30, 10), (100, 80)])
def test_partitions_of_every_size_are_drawn(tmp_path: Path, num_clients: int, num_classes: int) -> None:
    counts_CK = np.random.default_rng(0).integers(0, 90, (num_clients, num_classes))
    names = [f"class {k}" for k in range(num_classes)]
    figure = partition_picture(counts_CK, names, "digits, dealt by shards", num_clients)
    shown = texts(figure)
    assert {"digits, dealt by shards", "client", "class", *names} <= shown
    assert not any("only the first" in text for text in shown)
    assert ink(save_png(figure, tmp_path / "partition.png", dpi=50)) > 0.02


def test_a_partition_states_that_more_clients_exist() -> None:
    figure = partition_picture(np.ones((100, 3), dtype=int), (), "t", 1_000_000)
    assert any("only the first 100 of 1,000,000 clients are shown" in text for text in texts(figure))
    assert {"0", "1", "2"} <= texts(figure)


def test_the_total_of_each_client_and_class_is_beside_the_picture() -> None:
    figure = partition_picture(np.array([[3, 0], [1, 4]]), ["a", "b"], "t", 2)
    _, above, beside = figure.axes
    assert [bar.get_height() for bar in above.patches] == [3, 5]  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in beside.patches] == [4, 4]  # type: ignore[attr-defined]


def test_spread_marks_mean_and_worst_tenth(mnist: Path, tmp_path: Path) -> None:
    record = read_run(mnist)
    assert record.clients is not None
    record.clients["accuracy"] = [n / 20 for n in range(20)]
    figure = client_spread(record)
    assert {"mean: 47.50 %", "mean of the worst tenth: 2.50 %"} <= texts(figure)
    ranked, histogram = figure.axes
    heights = [bar.get_height() for bar in ranked.patches]  # type: ignore[attr-defined]
    assert heights == sorted(heights) and len(heights) == 20
    assert sum(bar.get_width() for bar in histogram.patches) == 20  # type: ignore[attr-defined]
    assert ink(save_png(figure, tmp_path / "clients.png", dpi=50)) > 0.1


def test_confusion_shows_shares_of_the_true_class(mnist: Path, tmp_path: Path) -> None:
    record = read_run(mnist)
    assert record.confusion is not None
    record.confusion["matrix"] = [[8, 2], [0, 40]]
    figure = confusion(record)
    assert {"80.0", "20.0", "100.0", "Confusion after round 20, in % of each true class"} <= texts(figure)
    assert "0.0" not in texts(figure)
    assert ink(save_png(figure, tmp_path / "confusion.png", dpi=50)) > 0.1


def test_many_letters_as_classes_are_drawn_as_they_are(shakespeare: Path, tmp_path: Path) -> None:
    figure = confusion(read_run(shakespeare))
    assert {"↵", "␣", r"\$", "<", "&"} <= texts(figure)
    assert ink(save_png(figure, tmp_path / "confusion.png", dpi=50)) > 0.01


def test_missing_parts_say_how_to_get_them(unfinished: Path, untested: Path) -> None:
    with pytest.raises(RunError, match=r"has no clients\.json.*evaluation\.clients_every"):
        client_spread(read_run(unfinished))
    with pytest.raises(RunError, match=r"has no confusion\.json.*evaluation\.every"):
        confusion(read_run(untested))


def test_hostile_text_is_plain() -> None:
    assert plain(r"$\frac{1}{0}$") == r"\$\frac{1}{0}\$"
    assert plain("a\0b\ud800\u202e") == "a\ufffdb\ufffd\ufffd"
    assert len(plain("x" * 500)) == 60
    figure = partition_picture(np.ones((2, 2), dtype=int), ["$x^", "\ud800"], r"$\undefined{$", 2)
    ET.fromstring(to_svg(figure))


def test_svg_follows_the_scheme_of_the_reader(mnist: Path) -> None:
    svg = to_svg(curves([read_run(mnist)]))
    root = ET.fromstring(svg)
    drawn = svg[svg.index("</style>") :]
    assert root.tag.endswith("svg") and "prefers-color-scheme:dark" in svg
    assert "var(--c0)" in drawn and "var(--ink)" in drawn and THEME["c0"][0] not in drawn
    assert not re.search(r"(?:href|src)=\"(?!#|data:)", svg)


def test_matplotlib_is_left_as_it_was(mnist: Path, tmp_path: Path) -> None:
    settings, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    save_png(curves([read_run(mnist)]), tmp_path / "a.png", dpi=40)
    assert dict(matplotlib.rcParams) == settings and ("matplotlib.pyplot" in sys.modules) == pyplot


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "new" / "a.txt", b"one").read_bytes() == b"one"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*folder: .*; choose another place"):
        write_whole(tmp_path / "folder", b"two")
    with pytest.raises(RunError, match="choose another place"):
        write_whole(tmp_path / "new" / "a.txt" / "b.txt", b"three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]
