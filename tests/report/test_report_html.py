"""The report: one page that is whole, safe and says the right numbers; also in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.report.html import export_png, page, write_report
from atoll.report.reading import read_run, rounds_to

VOID = {"meta", "link", "img", "input", "br"}
HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.data = data if self.tags[-1][1].get("type") == "application/json" else self.data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def check_whole(text: str) -> Page:
    """No element, attribute or style of the page can make a browser fetch or run anything that is not in it."""
    parsed = Page(text)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    for tag, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    assert not re.search(r"\{\{\w+\}\}", text)
    return parsed


def test_one_run_says_its_numbers(mnist: Path) -> None:
    out = write_report([mnist])
    assert out == mnist / "report.html"
    parsed = check_whole(out.read_text())
    record = read_run(mnist)
    accuracies = [row["test"]["accuracy"] for row in record.rows]
    to_90 = rounds_to(record, 0.9)
    assert to_90 is not None
    for words in (
        f"Final accuracy {100 * accuracies[-1]:.2f} %", f"Best accuracy {100 * max(accuracies):.2f} %",
        "Rounds 20 of 20 planned", "Wall time 2.40 s 120 ms a round", "Uplink 159 MB", "Downlink 159 MB",
        "Clients 100 10 updates in the last round", "Parameters 199,210", "Lost tasks 2 2 failed",
        f"To 90 % accuracy {to_90:.1f} rounds", "Ended after 20 of 20 rounds: all rounds done.",
        "2026-11-15 20:00 UTC", 'name = "shards"',
    ):  # fmt: skip
        assert words in re.sub(r" +", " ", parsed.text), words
    assert [tag for tag, _ in parsed.tags].count("img") == 4
    data = json.loads(parsed.data)
    assert data["runs"][0]["y"]["test.accuracy"] == [float(f"{a:.6g}") for a in accuracies]
    assert data["runs"][0]["x"]["bytes"][-1] == 159.368


def test_several_runs_are_compared(
    make_run: Callable[..., Path], unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plans = Plan(name="one"), Plan(name="two", algorithm={"name": "fedprox", "mu": 0.1})
    one, two = (make_run(tmp_path / plan.name, plan, num_clients=10**6, pictures=False) for plan in plans)
    assert write_report([one, two, unfinished]) == Path("report.html")
    parsed = check_whole((tmp_path / "report.html").read_text())
    for words in (
        "3 runs compared",
        "rounds to 90 %",
        "rounds to 95 %",
        "fedprox (mu 0.1)",
        "1,000,000",
        "not finished",
    ):
        assert words in parsed.text, words
    differs = parsed.text[parsed.text.index("What differs") : parsed.text.index("Curves")]
    assert "algorithm.mu – 0.1 –" in differs and "local.lr 0.1 0.1 0.05" in differs
    assert "server.lr" not in differs and "evaluation" not in differs
    assert [run["label"] for run in json.loads(parsed.data)["runs"]] == ["one", "two", "killed"]
    assert [tag for tag, _ in parsed.tags].count("details") == 3


def test_the_best_is_marked_only_where_there_is_a_best(make_run: Callable[..., Path], tmp_path: Path) -> None:
    reached = {"good": 0.99, "bad": 0.4}
    good, bad = (make_run(tmp_path / name, rounds=4, accuracy=a, pictures=False) for name, a in reached.items())
    text = page([read_run(good), read_run(bad)])
    accuracy = read_run(good).rows[-1]["test"]["accuracy"]
    assert f'<span class="best">{100 * accuracy:.2f} %</span>' in text
    assert '<span class="best">' not in page([read_run(good), read_run(good)])
    assert "the plans are the same" in text


def test_eighty_classes_and_an_accuracy_below_every_target(shakespeare: Path) -> None:
    parsed = check_whole(page([read_run(shakespeare)]))
    assert "To 45 % accuracy" in parsed.text or "To 50 % accuracy" in parsed.text
    assert json.loads(parsed.data)["runs"][0]["y"]["test.accuracy"][:5].count(None) == 4


def test_a_million_clients(million: Path) -> None:
    assert "Clients 1,000,000" in re.sub(" +", " ", check_whole(page([read_run(million)])).text)


def test_an_unfinished_run(unfinished: Path) -> None:
    words = check_whole(page([read_run(unfinished)])).text
    assert "Not finished: 11 of 20 rounds are recorded" in words and "Latest accuracy" in words


def test_a_run_without_tests_or_rows(untested: Path, make_run: Callable[..., Path], tmp_path: Path) -> None:
    parsed = check_whole(page([read_run(untested)]))
    assert "accuracy" not in parsed.text.split("Curves")[0] and json.loads(parsed.data)["measures"] == []
    assert (
        "No round is recorded yet."
        in check_whole(page([read_run(make_run(tmp_path / "new", rows=[], pictures=False))])).text
    )


def test_divergence_is_announced(make_run: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"round": n, "clients": 5, "train_loss": loss} for n, loss in ((1, 2.0), (2, float("nan")))]
    record = read_run(make_run(tmp_path / "run", rows=rows, pictures=False))
    parsed = check_whole(page([record]))
    assert "not a finite number in 1 of 2 rounds, first in round 2" in parsed.text
    assert json.loads(parsed.data)["runs"][0]["y"]["train_loss"] == [2.0, None]
    assert "diverged" in check_whole(page([record, record])).text


def hostile_run(make_run: Callable[..., Path], path: Path, pictures: bool = True) -> Path:
    """A run in which every text is an attack, a placeholder or not even text."""
    names = [HOSTILE, "\ud800\0", "{{data}}", "$x^{", "&amp;", "'\"", "\u202e", "a" * 300, "<!--", "]]>"]
    plan = Plan(
        name=HOSTILE, data={"name": "d", "note": HOSTILE}, partition={"name": "{{script}}"}, algorithm="<b>bold"
    )
    run = make_run(path, plan, rounds=3, class_names=names, pictures=pictures)
    info: dict[str, Any] = json.loads((run / "run.json").read_text())
    info |= {"engine": {"name": HOSTILE, "x": "\ud800"}, "started": HOSTILE, "atoll": "<!--", "num_clients": "<i>"}
    (run / "run.json").write_text(json.dumps(info))
    (run / "result.json").write_text(json.dumps({"reason": HOSTILE, "rounds": 3}))
    return run


def test_hostile_names_stay_text(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = hostile_run(make_run, tmp_path / "run")
    text = write_report([run]).read_text().replace("{{data}}", "").replace("{{script}}", "")
    parsed = check_whole(text)
    assert HOSTILE in parsed.text and "<b>bold" in parsed.text
    assert not {"b", "i"} & {tag for tag, _ in parsed.tags}
    assert json.loads(parsed.data)["runs"][0]["label"] == HOSTILE
    assert "<" not in parsed.data


def test_the_place_of_the_report_can_be_chosen(unfinished: Path, tmp_path: Path) -> None:
    assert write_report([unfinished], tmp_path) == tmp_path / "report.html"
    out = write_report([unfinished], tmp_path / "deep" / "page.html")
    assert out == tmp_path / "deep" / "page.html" and out.read_text() == (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "page.html", "report.html"]


def test_errors_say_what_to_do(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="name at least one run directory"):
        write_report([])
    with pytest.raises(RunError, match="name at least one run directory"):
        export_png([], tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(RunError, match=r"cannot write .*; choose another place"):
        write_report([unfinished], unfinished / "plan.toml" / "report.html")


def test_every_figure_can_be_exported_as_png(untested: Path, make_run: Callable[..., Path], tmp_path: Path) -> None:
    small = make_run(tmp_path / "small", Plan(name=f"{HOSTILE}/../"), rounds=3, num_clients=4, num_classes=3)
    alone = export_png([small], tmp_path / "one")
    assert [path.name for path in alone] == [
        "curves-round.png", "curves-seconds.png", "curves-bytes.png", "clients.png", "confusion.png", "partition.png",
    ]  # fmt: skip
    assert all(path.parent == tmp_path / "one" and path.read_bytes()[:4] == b"\x89PNG" for path in alone)
    rows = [{"round": 1, "train_loss": 1.0}, {"round": 2, "train_loss": 0.5}]
    same = [
        make_run(tmp_path / name, Plan(name="same"), rows=rows, clients=False, every=0, num_clients=4, num_classes=3)
        for name in "ab"
    ]
    names = [path.name for path in export_png(same, tmp_path / "two")]
    assert names == ["curves-round.png", "same-a-partition.png", "same-b-partition.png"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_curves_and_runs_nothing_else(make_run: Callable[..., Path], tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", pictures=False)
    out = write_report([good, hostile_run(make_run, tmp_path / "bad", pictures=False)], tmp_path / "page.html")
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--dump-dom",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", out.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    plots = re.findall(r'<div class="plot"><svg.*?</svg>', done.stdout, re.DOTALL)
    assert [plot.count("<path") for plot in plots] == [2, 4]
    assert "mnist-shards" in done.stdout and done.stdout.count("<script") == 2
