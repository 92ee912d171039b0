"""The page while runs go on: how soon it shows a round, and what it shows after the server was away."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from network.federation import free_port, until
from ui.browser import append_rows, go, link_to, opened, process, row_of, running, wait_for, write_run

ROUNDS = "Array.from(document.querySelectorAll('details[open] tbody tr'), row => +row.cells[0].textContent).reverse()"


def shown(page: Any) -> list[int]:
    """Return the rounds whose numbers the page shows, in order."""
    found: list[int] = page.evaluate(ROUNDS)
    return found


def show_numbers(page: Any, run: str) -> None:
    go(page, f"#/run/{run}")
    page.locator("figure", has_text="Test accuracy").locator("summary").click()
    page.wait_for_selector("details[open] tbody tr")


def test_a_round_that_is_written_is_drawn(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5, planned=60, ended=False)
    with link_to(tmp_path, "run") as link, opened(browser, link) as page:
        show_numbers(page, "run")
        assert shown(page) == [1, 2, 3, 4, 5]
        append_rows(tmp_path / "run", row_of(6), row_of(7))
        page.wait_for_selector("dt:has-text('Rounds') + dd:has-text('7')")
        wait_for(page, f"{ROUNDS}.length === 7")
        assert shown(page) == [1, 2, 3, 4, 5, 6, 7]
        wait_for(page, "document.title.includes('7/60')")


def test_rounds_that_are_repeated_replace_those_that_were_shown(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 9, planned=60, ended=False)
    with link_to(tmp_path, "run") as link, opened(browser, link) as page:
        show_numbers(page, "run")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        other = [json.dumps(row_of(number, shift=-0.5)) + "\n" for number in (5, 6)]
        (run / "new").write_text("".join(lines[:4] + other))
        (run / "new").replace(run / "metrics.jsonl")
        wait_for(page, f"{ROUNDS}.length === 6")
        assert shown(page) == [1, 2, 3, 4, 5, 6]
        newest = page.locator("details[open] tbody tr").first.text_content()
        assert newest == f"6{100 * row_of(6, shift=-0.5)['test']['accuracy']:.2f} %"


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_of_the_server_neither_loses_nor_repeats_a_round(browser: Any, tmp_path: Path, end: int) -> None:
    port, path = free_port(), tmp_path / "run"
    with running(path, 5), process(tmp_path, port) as first, opened(browser, first.link) as page:
        show_numbers(page, "run")
        first.end(end)
        page.wait_for_selector("text=Reconnecting")
        append_rows(path, *map(row_of, (6, 7, 8)))
        with process(tmp_path, port):
            page.wait_for_selector("text=Reconnecting", state="detached")
            wait_for(page, f"{ROUNDS}.length === 8")
            assert shown(page) == list(range(1, 9))
            append_rows(path, row_of(9))
            wait_for(page, f"{ROUNDS}.length === 9")
            assert shown(page) == list(range(1, 10))


SIMULATION = """name = "live"
rounds = 40
data = "mnist"
model = "mlp_2nn"
algorithm = "fedavg"
partition = { name = "iid", num_clients = 20 }
local = { steps = 20, batch_size = 20, lr = 0.1 }
policy = { name = "cohort", size = 10 }
evaluation = { every = 1 }
"""
"""Twenty steps of ten clients take a moment, so that the page has to show rounds one by one."""


@pytest.mark.slow
def test_a_round_of_a_simulation_is_on_the_page_within_a_second(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(SIMULATION)
    rows = tmp_path / "runs" / "live" / "metrics.jsonl"
    command = [sys.executable, "-m", "atoll.cli.main", "run", "plan.toml", "--out", "runs/live", "--ui"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        link = next(line for line in run.stdout if "#token=" in line).split()[-1]
        threading.Thread(target=run.stdout.read, daemon=True).start()
        with opened(browser, link) as page:
            assert page.url.endswith("#/run/live"), "the link leads to the run"
            page.evaluate(WATCH)
            written: dict[int, float] = {}

            def all_written() -> bool:
                num = rows.read_bytes().count(b"\n") if rows.is_file() else 0
                for number in range(len(written) + 1, num + 1):
                    written[number] = time.time()
                return len(written) == 40

            until(all_written, 120, "the rounds of the simulation")
            page.wait_for_selector("text=Ended after 40 of 40 rounds")
            seen = {int(number): at / 1000 for number, at in page.evaluate("window.seen").items()}
            late = [min(at for shown, at in seen.items() if shown >= n) - written[n] for n in written if n >= min(seen)]
            print(f"{len(seen)} of 40 rounds were drawn; at most {max(late):.3f} s from the file to the page")
            assert len(late) >= 10 and max(late) < 1
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()


WATCH = """() => {
  window.seen = {};
  const look = () => {
    const cards = [...document.querySelectorAll('.card')];
    const rounds = cards.find(card => card.querySelector('dt').textContent === 'Rounds');
    const number = rounds && +rounds.querySelector('.value').textContent;
    if (number) window.seen[number] ??= Date.now();
    requestAnimationFrame(look);
  };
  look();
}"""
"""Notes when a round is first shown, as the page is drawn."""
