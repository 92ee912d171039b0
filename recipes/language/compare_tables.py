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
    """Return the rows of the table of privacy: what remains of the gain over the base of the row without noise."""
    rows = found["rows"]
    noise = {"clip": "none", "none": "none, not clipped", "central": "server's", "local": "each client's"}
    seeds, noise_free = list(rows[0]["nats"]), [row for row in rows if row["mechanism"] == "clip"]
    whole_of = {(row["method"], row["rank"], row["cohort"]): row["nats"] for row in noise_free}
    titles = ["noise", "method", "rank", "cohort", "epsilon", "sigma", "server rate", *seeds_of(rows[0]["nats"])]
    lines = [line(*titles, "gain", "of that without noise")]
    for row in rows:
        free = whole_of[row["method"], row["rank"], row["cohort"]]
        gain, whole = (statistics.fmean(found["base"] - nats[seed] for seed in seeds) for nats in (row["nats"], free))
        lines.append(
            line(
                noise.get(row["mechanism"], row["mechanism"]),
                row["method"],
                str(row["rank"]),
                str(row["cohort"]),
                "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}",
                "0" if row["sigma"] is None else f"{row['sigma']:.3g}",
                f"{row['rate']:g}",
                *(f"{row['nats'][seed]:.3f}" for seed in seeds),
                f"{gain:.2f}",
                f"{100 * gain / whole:.0f} %",
            )
        )
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
