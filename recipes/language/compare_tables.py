"""Tables of compare.py, from its figures to lines of markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]
METHODS = ("fedit", "ffa_lora", "flora", "fedex_lora")


def methods_table(found: Json) -> list[str]:
    """Return the rows of the table of methods: nats a token by seed, and how far below local and unigram."""
    names = ["base", "unigram", "local", *METHODS]
    lines = [line("model", *(f"seed {seed}" for seed in found), "below local", "below unigram", "aggregation error")]
    for name in names:
        gaps = [
            [each[other] - each[name] for each in found.values()] if name in METHODS else []
            for other in ("local", "unigram")
        ]
        errors = [error for each in found.values() if (error := each.get(f"{name} error")) is not None]
        error = f"{statistics.fmean(errors):.2g}" if errors else "not measured" * (name in METHODS)
        lines.append(line(name, *(f"{each[name]:.3f}" for each in found.values()), *map(span, gaps), error))
    return lines


def codecs_table(found: Json) -> list[str]:
    """Return the rows of the table of codecs."""
    plain = found["none"]["nats"]
    lines = [line("uplink", "bytes an update", "times fewer than the model", *seeds_of(plain), "above none")]
    for name, each in found.items():
        more = [each["nats"][seed] - plain[seed] for seed in plain]
        lines.append(line(name, f"{each['bytes']:,.0f}", f"{each['fewer']:,.0f}", *numbers(each["nats"]), span(more)))
    return lines


def ranks_table(found: Json) -> list[str]:
    """Return the rows of the table of ranks."""
    alike = found["all 16"]
    lines = [line("ranks", *seeds_of(alike), "above all 16")]
    for name, nats in found.items():
        lines.append(line(name, *numbers(nats), span([nats[seed] - alike[seed] for seed in nats])))
    return lines


def privacy_table(found: Json) -> list[str]:
    """Return the rows of the table of privacy: what remains of the gain over the base without noise."""
    free = {(r["method"], r["rank"], r["cohort"]): found["base"] - r["nats"] for r in found["rows"] if not r["sigma"]}
    lines = [line("noise", "method", "rank", "cohort", "sigma", "epsilon", "nats", "gain", "of that without noise")]
    for row in found["rows"]:
        gain = found["base"] - row["nats"]
        share = gain / free[row["method"], row["rank"], row["cohort"]]
        sigma, epsilon = ("none", "none") if row["sigma"] is None else (f"{row['sigma']:g}", f"{row['epsilon']:.3f}")
        shown = (row["method"], row["rank"], row["cohort"], sigma, epsilon)
        mechanism = row["mechanism"] if row["sigma"] else "none"
        lines.append(line(mechanism, *map(str, shown), f"{row['nats']:.3f}", f"{gain:.3f}", f"{100 * share:.0f} %"))
    return lines


def line(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def seeds_of(nats: Mapping[str, float]) -> list[str]:
    """Return the titles of columns of seeds."""
    return [f"seed {seed}" for seed in nats]


def numbers(nats: Mapping[str, float]) -> list[str]:
    """Return nats as cells."""
    return [f"{value:.3f}" for value in nats.values()]


def span(values: Sequence[float]) -> str:
    """Return the least and the largest of some values."""
    return f"{min(values):.3f} to {max(values):.3f}" if values else ""
