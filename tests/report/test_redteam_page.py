"""Page and words of a red team, from findings made up here."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
from matplotlib.image import imread
from report.test_personal_page import HOSTILE, Strict

from atoll.report.redteam import (
    BROKEN,
    HOLDS,
    NO_TIME,
    NOTHING,
    OPEN,
    SOME,
    Change,
    Claim,
    Finding,
    Picture,
    Poisoned,
    RedTeam,
    Text,
    as_text,
)
from atoll.report.redteam_page import redteam_page
from atoll.report.redteam_words import CHECK, advice, got, not_tried, tried


def finding(probe: str, value: float, level: str = NOTHING, goal: str = "samples", **fields: Any) -> Finding:
    name = {"samples": "best PSNR in dB", "membership": "AUC"}.get(goal, "share of labels right")
    figures = {name: value, **fields.pop("more", {})}
    return Finding(probe, goal, "", figures, 1.0, "it looks", level, floor=fields.pop("floor", 15.0), **fields)


IMAGE = np.arange(64, dtype=np.uint8).reshape(8, 8)
OPENED = finding("linear_leak", 95.7, OPEN, pictures=(Picture(IMAGE, 255 - IMAGE, 95.7, 0.9),))
FAILED = finding("dlg", 12.0)


def team(**fields: Any) -> RedTeam:
    return RedTeam(
        **{"title": "made up", "plan_text": "rounds = 2", "sees": "2 updates", "findings": (OPENED, FAILED)} | fields
    )


def test_pictures_are_on_the_page_as_they_are() -> None:
    page = redteam_page(team())
    left, right = re.findall(r"data:image/png;base64,([\w+/=]+)", page)[:2]
    pixels = [imread(io.BytesIO(base64.b64decode(each)))[..., 0] * 255 for each in (left, right)]
    assert np.allclose(pixels[0], IMAGE, atol=0.5) and np.allclose(pixels[1], 255 - IMAGE, atol=0.5)
    assert "95.7 dB, SSIM 0.90" in page and "shows samples of the clients" in page
    assert Strict(page).scripts == 0 and "viewport" in page and "prefers-color-scheme:dark" in page


def test_what_is_broken_stands_first_and_what_holds_does_not() -> None:
    claims = (Claim("local noise", "noise of 1 clip", "0.1 clips", BROKEN), Claim("masks", "nothing", "uniform", HOLDS))
    page = redteam_page(team(claims=claims))
    assert page.index("<strong>Broken:</strong> local noise") < page.index("In words")
    assert page.count("<strong>Broken:</strong>") == 1
    assert advice(team(claims=claims))[0].startswith("Mend local noise before anything else")
    assert "<strong>Broken:</strong>" not in redteam_page(team(claims=claims[1:]))


def test_the_best_of_all_attacks_counts() -> None:
    lines = got(team(findings=(FAILED, OPENED, finding("lira", 0.5, goal="membership", floor=0.5))))
    assert lines[0] == "Laid open: clients' samples; linear_leak has best PSNR 95.7 dB (15.0 dB without an attack)."
    assert len(lines) == 2 and lines[1].startswith(
        "Not beyond guessing and chance: whether a known sample was trained on"
    )


def test_epsilon_stands_beside_the_claim() -> None:
    member = finding("lira", 0.6, SOME, "membership", floor=0.5, more={"empirical epsilon": 0.4})
    private, open_plan = team(findings=(member,), epsilon=2.5, delta=1e-5), team(findings=(member,))
    assert "epsilon is at least 0.4, the plan claims 2.5" in got(private)[0] and "claims none" in got(open_plan)[0]
    assert "2.5 (delta 1e-05, all rounds)" in redteam_page(private)


def test_advice_follows_from_what_defences_changed() -> None:
    on = Change("secure aggregation", "secagg = {}", False, (finding("linear_leak", 14.0),), "sums")
    off = Change("top_k on the uplink", "uplink", True, (OPENED,), "updates")
    useless = Change("half on the uplink", "uplink", True, (OPENED,), "updates")
    [line] = advice(team(changes=(on,)))
    assert line.startswith("Set secagg = {}: clients' samples: best PSNR 95.7 dB") and "becomes 14.0 dB" in line
    guarded = team(findings=(finding("linear_leak", 14.0),), changes=(off,))
    assert advice(guarded)[0].startswith("Keep top_k on the uplink: without it clients' samples")
    assert "do not count on it" in advice(team(changes=(useless,)))[0]
    untried = Finding("linear_leak", "samples", NO_TIME, {}, 0.0, "")
    assert "Set" not in advice(team(changes=(on._replace(findings=(untried,)),)))[0]
    refused = on._replace(findings=(), why_not="the plan is refused")
    assert "Set" not in advice(team(changes=(refused,)))[0]
    hidden = on._replace(findings=(untried._replace(why_not="the server sees sums alone"),))
    assert "becomes nothing (the server sees sums alone)" in advice(team(changes=(hidden,)))[0]
    page = redteam_page(team(changes=(on, Change("noise", "privacy = {}", False, why_not="the plan is refused"))))
    assert "With secure aggregation, the server sees sums." in page and "With noise: the plan is refused" in page


def test_a_planted_model_leads_to_the_check_that_stops_it() -> None:
    planted = team(findings=(finding("trap_weights", 138.0, OPEN, active=True),))
    assert CHECK[:60] in redteam_page(planted) and "max_change" in advice(planted)[0]
    assert CHECK[:60] not in redteam_page(team())


def test_poisoning_is_compared_with_no_attack() -> None:
    runs = (
        Poisoned("no attack", "mean", 9, "accuracy", 0.9),
        Poisoned("sign_flip", "mean", 9, "accuracy", 0.4),
        Poisoned("backdoor", "mean", 9, "accuracy", 0.9, 0.97),
        Poisoned("alie", "mean", 0, "", None, why_not="there was no time"),
    )
    found = team(poisoned=runs, attackers="20% of the clients")
    page, said = redteam_page(found), advice(found)
    assert "40.00 %" in page and "90.00 %" in page and "97.0%" in page
    assert "goes from 90.00 % to 40.00 % in 9 rounds under sign_flip" in said[0] and "97%" in said[1]
    assert any("alie against mean: there was no time" in line for line in not_tried(found))
    assert "20% of the clients attacked the model: sign_flip, backdoor" in " ".join(tried(found))


def test_nothing_on_the_page_is_markup_of_others() -> None:
    text = Text(HOSTILE, HOSTILE, 1.0)
    numbers = Picture(np.array([0.5, 1.0]), np.array([0.4, 1.0]), 20.0, 0.0)
    hostile = finding(HOSTILE, 20.0, SOME, texts=(text,), pictures=(numbers,))
    found = team(
        title=HOSTILE,
        plan_text=HOSTILE,
        sees=HOSTILE,
        findings=(hostile, Finding("x", "tokens", HOSTILE, {}, 0.0, HOSTILE)),
        changes=(Change(HOSTILE, HOSTILE, False, (hostile,), HOSTILE, HOSTILE),),
        claims=(Claim(HOSTILE, HOSTILE, HOSTILE, BROKEN),),
        poisoned=(Poisoned(HOSTILE, HOSTILE, 0, "", None, why_not=HOSTILE),),
        attackers=HOSTILE,
        not_tried=(HOSTILE,),
    )
    page = redteam_page(found)
    assert Strict(page).scripts == 0 and "0.5 1\n0.4 1" in page and HOSTILE in as_text(found)
