"""The model card of an adapter or a merged model: what it is of, and how it was trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.core.plan import Plan
from atoll.ledger.chain import read
from atoll.models.hf_files import base_directory, base_hash

LICENCE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)


def card(
    plan: Plan, rows: Sequence[Mapping[str, Any]], info: Mapping[str, Any], run: Path | None, *, merged: bool
) -> str:
    """Return a README that states base, licence, clients, rounds, bytes, privacy, ledger and measures of a run."""
    base, last = str(plan.model.options["path"]), rows[-1] if rows else {}
    licence = base_licence(base)
    head = ["---", f"base_model: {json.dumps(base)}", f"library_name: {'transformers' if merged else 'peft'}"]
    head += [f"license: {licence}"] if licence else []
    facts = {
        "Base": f"`{base}`, SHA-256 of its weights {base_hash(base)}",
        "Licence of the base": licence or "unknown: its files do not say",
        "Tuned": plan.model.options.get("tune", "lora"),
        "Algorithm": plan.algorithm.name,
        "Clients": info.get("num_clients") or f"{last.get('clients', 'unknown')} in the last round",
        "Rounds": last.get("round", 0),
        "Bytes up, all clients": f"{last['bytes_up']:,}" if "bytes_up" in last else "unknown",
        "Privacy": _privacy(last.get("privacy")),
        "Ledger": ledger_hash(run) or "none: the run was a simulation",
        "Plan": info.get("identity", plan.identity()),
    }
    measured: Mapping[str, Any] = next((row["test"] for row in reversed(rows) if "test" in row), {})
    facts |= {f"Test {name}": f"{measured[name]:.4g}" for name in ("loss", "perplexity") if measured.get(name)}
    what = "A language model" if merged else "An adapter for a language model"
    table = [f"| {name} | {value} |" for name, value in facts.items()]
    text = [
        *head,
        "---",
        "",
        f"# {plan.name or 'Federated fine-tuning'}",
        "",
        f"{what}, trained by federated learning with Atoll.",
        "",
    ]
    return "\n".join([*text, "| | |", "|---|---|", *table, ""])


def base_licence(path: str) -> str | None:
    """Return the licence that the card of a base names in its first lines, if it has one."""
    file = base_directory(path) / "README.md"
    found = LICENCE.search(file.read_text(encoding="utf-8", errors="replace")[:4000]) if file.is_file() else None
    return found[1] if found else None


def ledger_hash(run: Path | None) -> str | None:
    """Return the hash of the last record in the ledger of a federation's run."""
    file = None if run is None else run / "ledger.jsonl"
    if file is None or not file.is_file():
        return None
    last, _ = read(file.read_text(encoding="utf-8").splitlines()[-1])
    return last.hash()


def _privacy(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return "none: updates were not protected"
    text = f"epsilon {spent['epsilon']:.4g} at delta {spent['delta']:g}, by {spent.get('unit', 'client')}"
    return text + (f"; {spent['warning']}" if "warning" in spent else "")
