"""The pages of a directory of runs, in a real browser: tables, curves, comparison, downloads, sessions."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from ui.browser import PAGES, go, opened

COMPARED = "#/compare?" + "&".join(f"id=sweep/lr=0.1/seed{seed}" for seed in range(3))


def test_the_table_filters_sorts_and_compares(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        page.wait_for_selector("text=6 of 6 runs shown")
        assert page.url.endswith("/ui/#/"), "the token stays in the address"
        assert page.locator("tr", has_text="broken").locator("text=unreadable").count() == 1
        page.get_by_placeholder("Filter by name").fill("sweep seed1")
        page.wait_for_selector("text=1 of 6 runs shown")
        page.get_by_placeholder("Filter by name").fill("sweep")
        page.get_by_role("button", name="Test figure").click()
        names = page.locator("tbody tr small").all_text_contents()
        assert [name for name in names if name.startswith("sweep")] == [f"sweep/lr=0.1/seed{n}" for n in (2, 1, 0)]
        for box in page.locator("tbody input[type=checkbox]").all():
            box.check()
        page.get_by_role("link", name="Compare 3 ticked").click()
        page.wait_for_selector("text=3 runs compared")


def test_a_run_shows_its_curves_and_their_numbers(browser: Any, link: str, runs: Path) -> None:
    rows = [json.loads(line) for line in (runs / "demo-1" / "metrics.jsonl").read_text().splitlines()]
    with opened(browser, link) as page:
        go(page, "#/run/demo-1?y=test.f1")
        page.wait_for_selector("canvas[aria-label*='Test F1, newest values']")
        page.locator("figure", has_text="Test F1").locator("summary").click()
        page.wait_for_selector("details[open] tbody tr")
        cells = page.locator("details[open] tbody tr").all_text_contents()
        assert cells == [f"{row['round']}{100 * row['test']['f1']:.2f} %" for row in reversed(rows)]


def test_arrow_keys_read_a_curve(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        go(page, "#/run/demo-1")
        plot = page.get_by_role("group", name="Test accuracy: arrow keys read values")
        plot.focus()
        for key, said in (("Home", "Round 1:"), ("ArrowRight", "Round 2:"), ("End", "Round 30:")):
            plot.press(key)
            page.wait_for_selector(f"p[aria-live] >> text={said}", state="attached")
            assert page.locator(".tip:visible").count() == 1
        plot.press("Escape")
        assert page.locator(".tip:visible").count() == 0


def test_seeds_are_grouped_and_downloaded(browser: Any, link: str, tmp_path: Path) -> None:
    with opened(browser, link, accept_downloads=True) as page:
        go(page, COMPARED)
        page.get_by_role("button", name="mean over seeds").click()
        page.wait_for_selector("td:has-text('3 seeds')")
        assert "group=seeds" in page.url
        assert page.locator(".legend button").all_text_contents() == ["sweep/lr=0.1"]
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV of what is shown").click()
        download.value.save_as(tmp_path / "shown.csv")
        rows = list(csv.DictReader((tmp_path / "shown.csv").open()))
        assert len(rows) == 30
        assert all(abs(float(row["deviation"]) - 0.01) < 1e-9 for row in rows)
        with page.expect_download() as download:
            page.get_by_role("button", name="PNG").first.click()
        download.value.save_as(tmp_path / "chart.png")
        assert (tmp_path / "chart.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_legend_hides_curves(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        go(page, COMPARED)
        page.wait_for_selector("canvas[aria-label*='lr=0.1/seed1']")
        page.locator(".legend").get_by_role("button", name="sweep/lr=0.1/seed1").click()
        page.wait_for_selector("canvas:not([aria-label*='lr=0.1/seed1'])")
        label = page.locator("canvas").first.get_attribute("aria-label")
        assert "seed0" in label and "seed1" not in label and "seed2" in label


def test_every_view_of_a_run_opens(browser: Any, link: str, runs: Path) -> None:
    with opened(browser, link) as page:
        expected = {
            "Clients": "Spread over clients",
            "Data": "Who holds which samples",
            "Ledger": "This run has no ledger",
            "Plan": 'name = "demo"',
            "Log": "begins after round 0",
            "Files": "metrics.jsonl",
        }
        go(page, "#/run/demo-1")
        for view, text in expected.items():
            page.get_by_role("navigation", name="Views of the run").get_by_role("link", name=view).click()
            page.wait_for_selector(f"main >> text={text}")


def test_an_unknown_run_is_said_to_be_unknown(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        go(page, "#/run/never/was?x=bytes")
        page.wait_for_selector("text=there is no run 'never/was' here")


def test_without_a_session_the_page_asks_for_a_token(browser: Any, link: str) -> None:
    with opened(browser, link.partition("#")[0]) as page:
        page.get_by_label("Token or link").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        assert page.get_by_role("alert").text_content()
        page.get_by_label("Token or link").fill(link)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_selector("text=6 of 6 runs shown")
        page.get_by_role("button", name="sign out").click()
        page.wait_for_selector("text=Open the link that Atoll printed")


def test_links_are_made_and_revoked(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        page.get_by_role("link", name="Access").click()
        page.get_by_label("For whom").fill("a partner")
        page.get_by_role("button", name="Make a link").click()
        made = page.get_by_label("Link", exact=True).input_value()
        with opened(browser, made) as guest:
            guest.wait_for_selector("text=6 of 6 runs shown")
            assert guest.get_by_role("link", name="Access").count() == 0
            page.locator("tr", has_text="a partner").get_by_role("button", name="Revoke").click()
            page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
            guest.wait_for_selector("text=Sign in")


def test_settings_are_remembered(browser: Any, link: str) -> None:
    with opened(browser, link) as page:
        page.get_by_label("Language").select_option("zh")
        page.wait_for_selector("h1 >> text=运行")
        page.get_by_label("配色").select_option("dark")
        page.reload()
        page.wait_for_selector("h1 >> text=运行")
        shown = page.evaluate("[document.documentElement.lang, getComputedStyle(document.body).backgroundColor]")
        assert shown == ["zh-CN", "rgb(12, 18, 24)"]


@pytest.mark.parametrize("language", ["en-GB", "zh-CN"])
def test_the_page_fits_a_phone(browser: Any, link: str, language: str) -> None:
    with opened(browser, link, viewport={"width": 360, "height": 740}, locale=language) as page:
        for route, selector in PAGES.items():
            go(page, route)
            page.wait_for_selector(f"main {selector}")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, f"{route} is {wide} pixels wide"
