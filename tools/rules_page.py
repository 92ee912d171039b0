"""Write docs/rules.md from the table of rules.

python tools/rules_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w

from atoll.checks.rule import EXAMPLE_PLAN, Changes, general
from atoll.checks.table import TABLE
from atoll.checks.views import Budget, Networked, NewClients, Parts, Round, Served, ServerSamples, Simulated

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"
HEAD = """\
# Rules

What goes together in a plan, and what does not. Every rule below looks at more than one part; what a single option
may be is said where its part is documented. The rules are applied in this order, in a simulation and on the server of a
network before any client trains, and by clients of a network to the part of the plan that they are told. The first one
that is broken refuses the plan, with the way out.

```sh
atoll plan check plan.toml                 # which rules apply, and that they are kept
atoll plan check plan.toml --clients 5     # as a server with five clients builds the plan
atoll plan check plan.toml --json          # for machines
```

A refused plan ends with code 2 and the name of the rule. Examples change this plan:

```toml
{base}
```

This page is written by `python tools/rules_page.py` from the table in `atoll.checks`, whose rules are tested both ways:
each example is refused, and with the way out it runs.
"""
TITLES = {
    Networked: "Between organisations",
    NewClients: "When clients are held out of training",
    ServerSamples: "When the data are dealt out",
    Simulated: "In a simulation",
    Parts: "When the parts are built",
    Budget: "Before a private run",
    Round: "After the rehearsal of a round",
    Served: "On the server of a network",
}


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD.replace("{base}", _base())]
    for view, rules in TABLE.items():
        lines += [f"## {TITLES[view]}", ""]
        for rule in rules:
            parts = ", ".join(f"`{part}`" for part in rule.parts)
            lines += [f"### {rule.name}", "", f"- Looks at: {parts}", f"- Reason: {general(rule.reason)}"]
            lines += [f"- Way out: {general(rule.way_out)}"]
            lines += [f"- Refused: `{_settings(changes)}`" for changes in rule.refused]
            lines += [f"- Then runs with: `{_settings(rule.mended)}`", ""]
    return "\n".join(lines).rstrip() + "\n"


def _base() -> str:
    """Return the plan of the examples, as far as it differs from the default."""
    kept = ("partition", "policy", "local", "rounds", "engine")
    plain = {key: value for key, value in EXAMPLE_PLAN.to_dict().items() if key in kept}
    plain["local"] = {key: plain["local"][key] for key in ("steps", "batch_size")}
    return "\n".join(f"{key} = {_toml(value)}" for key, value in plain.items())


def _settings(changes: Changes) -> str:
    """Return changes to a plan as one types them after --set; what is left out has no value."""
    return ", ".join(f"{key}={'' if value is None else _toml(value)}" for key, value in changes.items())


def _toml(value: object) -> str:
    """Return a value as TOML has it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return re.sub(r"^value = |\n$", "", tomli_w.dumps({"value": value}))


if __name__ == "__main__":
    PAGE.write_text(page())
