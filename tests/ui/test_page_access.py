"""Whether people who use a screen reader, a keyboard or strong contrast can use the page, as axe judges."""

from __future__ import annotations

from typing import Any

import pytest
from ui.browser import PAGES, go, opened, serious


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, link: str, scheme: str) -> None:
    with opened(browser, link, color_scheme=scheme) as page:
        found = {}
        for route, selector in PAGES.items():
            go(page, route)
            page.wait_for_selector(f"main {selector}")
            found[route] = serious(page)
        assert not {route: each for route, each in found.items() if each}
    with opened(browser, link.partition("#")[0], color_scheme=scheme) as page:
        assert not serious(page)
        page.evaluate("document.querySelector('main').append(document.createElement('button'))")
        assert [each.partition(":")[0] for each in serious(page)] == ["button-name"], "axe finds nothing at all"
