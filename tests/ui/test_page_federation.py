"""The page of a real federation, in a real browser: what an operator does there, and what a viewer cannot."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from network.federation import certificates, federation, until
from network.fork_server import ForkServer
from ui.browser import go, opened, serious

from atoll import Plan
from atoll.cli.join import enrol
from atoll.network.server.access import Access, Role
from atoll.ui.serving import local_link

PLAN = Plan(
    seed=11,
    rounds=6,
    partition={"name": "dirichlet", "num_clients": 2, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.3, "batch_size": 16},
    policy={"name": "cohort", "size": 2},
    detection="cosine",
    contribution={"name": "leave_one_out"},
    server={"samples": 60},
    evaluation={"clients_every": 2},
)


@pytest.mark.slow
def test_an_operator_works_from_the_page(browser: Any, processes: ForkServer, tmp_path: Path) -> None:
    certs = certificates(tmp_path / "certs")
    with federation(tmp_path / "together", processes, certs, PLAN) as made:
        made.serve("--clients", "2", plan=False)
        link = local_link(Access(made.home), made.admin_port)
        with opened(browser, link) as page:
            page.get_by_role("link", name="Clients", exact=True).click()
            tokens: list[str] = [""]
            for number in range(2):
                page.get_by_role("button", name="Make a token").click()
                page.wait_for_selector("text=It is shown only once")
                token = until(lambda: {page.get_by_label("Enrolment token").input_value()} - {*tokens}, 30).pop()
                tokens.append(token)
                with contextlib.redirect_stdout(io.StringIO()):
                    enrol(made.url, token, f"c{number}", made.root / f"c{number}", made.certs / "ca.pem")
                page.wait_for_selector(f"tr:has-text('c{number}') >> text=pending")
                page.get_by_label(f"Tick c{number}").check()
                page.get_by_role("button", name="Approve 1").click()
                page.wait_for_selector(f"tr:has-text('c{number}') >> text=approved")
            assert not serious(page)

            page.get_by_role("link", name="Start a run").click()
            page.get_by_label("or paste it").fill('algorithm = "fedavgg"')
            page.get_by_role("button", name="Check").click()
            page.wait_for_selector(".verdict.bad >> text=fedavgg")
            page.get_by_label("or paste it").fill(PLAN.to_toml())
            page.get_by_role("button", name="Check").click()
            page.wait_for_selector("text=The plan can be run")
            assert page.locator(".rules li").count() > 0
            assert not serious(page)
            page.get_by_label("Name of the run").fill("law")
            page.get_by_role("button", name="Start", exact=True).click()
            page.wait_for_selector("h1 >> text=law")
            for number in range(2):
                made.join(number, once=False)
            page.wait_for_selector("text=Ended after 6 of 6 rounds", timeout=60_000)

            go(page, "#/run/law?view=clients")
            page.wait_for_selector("th:has-text('Trust')")
            page.wait_for_selector("th:has-text('Contribution')")
            assert not serious(page)
            go(page, "#/run/law?view=ledger")
            page.get_by_role("button", name="Verify").click()
            page.wait_for_selector("text=The ledger holds")
            assert page.locator(".ledger li").count() == len(made.lines("law"))
            assert not serious(page)

            made.add("long", PLAN.replace({"rounds": 100_000}))
            go(page, "#/run/long")
            page.get_by_role("button", name="Stop").click()
            page.get_by_role("dialog").get_by_role("button", name="Stop").click()
            page.wait_for_selector("h1:has-text('ended')")

            text, _ = Access(made.home).add("partner", Role.VIEWER, 600)
            with opened(browser, f"{link.partition('#')[0]}#token={text}") as guest:
                guest.wait_for_selector("text=2 of 2 runs shown")
                assert guest.get_by_role("link", name="Start a run").count() == 0
                go(guest, "#/clients")
                guest.wait_for_selector("tr:has-text('c0')")
                assert guest.locator("input[type=checkbox], button.danger").count() == 0

            go(page, "#/clients")
            page.get_by_label("Tick c1").check()
            page.get_by_role("button", name="Revoke 1").click()
            page.get_by_role("dialog").get_by_role("button", name="Revoke 1").click()
            page.wait_for_selector("tr:has-text('c1') >> text=revoked")
            go(page, "#/access")
            page.wait_for_selector(".ledger >> text=revoke")
            page.get_by_role("button", name="Verify").click()
            page.wait_for_selector("text=The ledger holds")
            assert not serious(page)
