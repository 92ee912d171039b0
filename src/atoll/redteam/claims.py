"""Compare what a plan claims of its defences with what is seen of them. Shapes: L values of a masked vector.

Claims are looked at where they can fail: loud canaries show how long an update may be and how large the noise is, two
secure sums of the same clients show whether masks are used twice, and clients' updates show whether they are clipped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import numpy as np

from atoll.commit.guard import planned
from atoll.core.errors import AtollError, PlanError
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure, Mechanism
from atoll.privacy.accounting import spent
from atoll.report.redteam import BROKEN, HOLDS, NO_TIME, UNCHECKED, Claim, Finding, figure_text
from atoll.secagg.scheme import Scheme, Session, in_this_process
from atoll.simulation.audit import Audit, audit_plan
from atoll.simulation.overhearing import KEPT, overheard
from atoll.simulation.seat import Watched, watch
from atoll.train.secure import Secure

CANARIES = 256
"""Canaries that the noise is measured with: so many see noise of less than half the claimed size."""
CONFIDENCE = 1 - 1e-6
"""Confidence of bounds that refute a claim: whole defences must not be called broken."""
SURE = 5.0
"""Standard deviations that a measured figure must be away from its claim to refute it."""
NEAR = 1 / 16
"""Two masked values are near each other if they differ by less than this share of the ring either way."""
LONGER = 1.001
"""Factor by which an update may exceed its bound for rounding."""
PLAYERS = 10
"""Clients of the secure sums in which reuse of masks is looked for."""

Spent = tuple[Mechanism, Exposure]


def check_claims(plan: Plan, watched: Watched, findings: Sequence[Finding], is_over: Callable[[], bool]) -> list[Claim]:
    """Return what became of every claim of the plan; what there is no time for is not checked."""
    checks: list[tuple[str, Callable[[], list[Claim]]]] = []
    if plan.privacy is not None:
        checks.append(("empirical epsilon", partial(_epsilon_claims, plan, watched, findings)))
        checks.append((f"{plan.privacy.name} noise", partial(_noise_claims, plan)))
    if watched.job.secure is not None:
        checks.append(("secure aggregation", partial(_sum_claims, plan, watched)))
    for place, part in enumerate(plan.uplink):
        if part.name == "clip":
            checks.append(("clip", partial(_clip_claims, plan, place)))
    claims = list[Claim]()
    for name, run in checks:
        if is_over():
            claims.append(Claim(name, "what the plan says", NO_TIME, UNCHECKED))
            continue
        try:
            claims += run()
        except AtollError as error:
            claims.append(Claim(name, "what the plan says", str(error), UNCHECKED))
    return claims


def claimed_epsilon(plan: Plan, rounds: int | None = None) -> tuple[float, float] | None:
    """Return the epsilon that the plan's accountant claims for all or some of its rounds, and delta; None if none."""
    if plan.privacy is None:
        return None
    mechanism, exposure = planned(plan)
    attempts = max(1, plan.rounds if rounds is None else rounds)
    return spent(mechanism, exposure._replace(attempts=attempts)).epsilon, mechanism.delta


def _epsilon_claims(plan: Plan, watched: Watched, findings: Sequence[Finding]) -> list[Claim]:
    """Compare what attacks on membership show at least with what the accountant claims for the rounds seen."""
    claimed = claimed_epsilon(plan, len(watched.sights))
    shown = [each.figures["empirical epsilon"] for each in findings if "empirical epsilon" in each.figures]
    if claimed is None or not shown:
        return []
    epsilon, delta = claimed
    return [
        Claim(
            "empirical epsilon",
            f"epsilon at most {figure_text(epsilon)} at delta {delta:g} after {len(watched.sights)} rounds",
            f"attacks on membership show at least {figure_text(max(shown))}, at 99.9 % confidence",
            BROKEN if max(shown) > epsilon else HOLDS,
        )
    ]


def _noise_claims(plan: Plan) -> list[Claim]:
    """Measure noise and clip by canaries in what the plan's own mechanism releases."""
    assert plan.privacy is not None
    name = plan.privacy.name
    if plan.privacy.options.get("test_noise"):
        seen = "test_noise derives it from the plan's seed, so that everybody can subtract it: leave test_noise out"
        return [Claim(f"{name} noise", "noise that nobody else knows", seen, BROKEN)]
    audit = audit_plan(plan, CANARIES, CONFIDENCE)
    return [_noise_claim(name, audit), _length_claim(name, audit), *_rate_claim(name, audit)]


def _noise_claim(name: str, audit: Audit) -> Claim:
    counts, claimed = audit.counts, 1 / audit.claim.mu
    deviation = counts.deviation
    at_most = deviation * (1 + SURE / math.sqrt(2 * max(1, counts.outside)))
    broken = at_most < 0.99 * claimed or (audit.mu > audit.claim.mu and counts.mean_length < 1.5)
    share = f"{deviation / claimed:.0%} of what is claimed"
    return Claim(
        f"{name} noise",
        f"noise of at least {figure_text(claimed)} clips on what is released",
        f"{figure_text(deviation)} clips ({share}), where no client sends anything",
        BROKEN if broken else HOLDS,
    )


def _length_claim(name: str, audit: Audit) -> Claim:
    counts, noise = audit.counts, max(1 / audit.claim.mu, audit.counts.deviation)
    at_least = counts.mean_length - SURE * noise / math.sqrt(max(1, counts.inside))
    return Claim(
        f"{name} clip",
        "nobody moves what is released by more than one clip",
        f"clients, or samples, of 1000 clips move it by {figure_text(counts.mean_length)} clips on average",
        BROKEN if at_least > 1.01 else HOLDS,
    )


def _rate_claim(name: str, audit: Audit) -> list[Claim]:
    if audit.claim.rate >= 1:
        return []
    return [
        Claim(
            f"{name} sampling",
            f"each is drawn with a chance of {figure_text(audit.claim.rate)}",
            f"at least {figure_text(audit.rate)} were drawn, at {audit.confidence:.4%} confidence",
            HOLDS if audit.rate <= audit.claim.rate else BROKEN,
        )
    ]


def _sum_claims(plan: Plan, watched: Watched) -> list[Claim]:
    """Look for sums of too few clients, and for masks that are used twice."""
    secure = watched.job.secure
    assert secure is not None
    least = min((num for sight in watched.sights for num in sight.num_clients_R), default=0)
    wanted = secure.settings.required_survivors
    sums = Claim(
        "secure aggregation",
        f"the server reads sums of at least {wanted} clients",
        f"the smallest sum that it read is of {least}" if least else "no sum was opened",
        BROKEN if 0 < least < wanted else HOLDS,
    )
    masked = [dict(sight.masked) for sight in watched.sights]
    return [sums, mask_claim(masked + [_overheard_sum(secure, attempt) for attempt in range(2)])]


def mask_claim(masked: Sequence[dict[int, np.ndarray]]) -> Claim:
    """Compare masked vectors of all clients and rounds: with fresh masks their differences are uniform."""
    claim = "what a client sends under its masks says nothing"
    named = [
        (f"client {client} in sum {place}", each) for place, one in enumerate(masked) for client, each in one.items()
    ]
    if not named:
        seen = "this scheme sends no masked vectors: its encryption was not looked at"
        return Claim("masks", claim, seen, UNCHECKED)
    for name, each in named:
        if near_share(each, np.zeros_like(each)) > _most_near(len(each)):
            return Claim("masks", claim, f"{name} sent its values unmasked", BROKEN)
    for (one, a), (other, b) in combinations(named, 2):
        if a.dtype == b.dtype and near_share(a, b) > _most_near(min(len(a), len(b))):
            seen = f"{one} and {other} used the same masks: the difference of their updates can be read"
            return Claim("masks", claim, seen, BROKEN)
    seen = f"the differences of {len(named)} masked vectors look uniform, between clients and between sums"
    return Claim("masks", claim, seen, HOLDS)


def near_share(a_L: np.ndarray, b_L: np.ndarray) -> float:
    """Return the share of entries that differ by less than NEAR of the ring: 2 NEAR if masks are fresh.

    >>> near_share(np.array([5, 7], np.uint32), np.array([6, 1 << 31], np.uint32))
    0.5
    """
    num = min(len(a_L), len(b_L))
    apart_L = a_L[:num] - b_L[:num]  # wraps around
    distance_L = np.minimum(apart_L, np.zeros_like(apart_L) - apart_L)
    return float((distance_L < NEAR * 2.0 ** (8 * a_L.dtype.itemsize)).mean())


def _most_near(num: int) -> float:
    chance = 2 * NEAR
    return chance + 6 * math.sqrt(chance * (1 - chance) / max(1, num))


def _overheard_sum(secure: Secure, attempt: int) -> dict[int, np.ndarray]:
    """Let clients add small numbers by the plan's own scheme, and return what the server hears of each."""
    masked: dict[int, np.ndarray] = {}
    scheme: Scheme = overheard(secure.scheme, masked)
    encoding = secure.encoding(PLAYERS)
    session = Session(
        run="red team",
        round=attempt,
        attempt=attempt,
        model=hashlib.sha256(b"red team").digest(),
        clients=tuple(range(PLAYERS)),
        silent={},
        length=KEPT,
        encoding=encoding,
        vector=lambda client: np.arange(KEPT, dtype=encoding.dtype) % (client + attempt + 2),
        min_survivors=2,
    )
    scheme.check(PLAYERS)
    scheme.simulate(session, in_this_process)
    return masked


def _clip_claims(plan: Plan, place: int) -> list[Claim]:
    """Compare the norms of updates behind a clip of the uplink with its bound, and with those before it."""
    bound = float(plan.uplink[place].options["norm"])
    open_plan = plan.replace({"secagg": None, "privacy": None}) if plan.secagg or plan.privacy else plan
    parts = [part.to_dict() for part in open_plan.uplink[: place + 1]]
    try:
        clipped, before = (_longest(open_plan.replace({"uplink": uplink})) for uplink in (parts, parts[:-1]))
    except PlanError as error:
        return [Claim("clip", f"updates of norm at most {bound:g}", str(error), UNCHECKED)]
    unused = "" if before > bound else ": it cuts none of these, so lower it"
    return [
        Claim(
            "clip",
            f"updates of norm at most {bound:g}",
            f"the longest has norm {figure_text(clipped)}, and {figure_text(before)} without the clip{unused}",
            BROKEN if clipped > LONGER * bound else HOLDS,
        )
    ]


def _longest(plan: Plan) -> float:
    sights = watch(plan, 1).sights
    return max((float(norm) for sight in sights for norm in sight.rows.delta_D.double().norm(dim=1)), default=0.0)
