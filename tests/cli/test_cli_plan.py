"""`atoll plan check`: which rules a plan keeps, or which one refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atoll.checks.table import rules

PLAN = """
rounds = 1
engine = "inline"
partition = {name = "iid", num_clients = 6}
policy = {size = 4}
local = {steps = 1}
"""


def written(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN + more)
    return path


def test_the_rules_that_apply_are_listed(cli: Any, tmp_path: Path) -> None:
    said = cli("plan", "check", written(tmp_path))
    assert said.code == 0 and not said.err
    names = [line.split()[1] for line in said.out.splitlines() if line.startswith("passed")]
    assert "policy-fits-clients" in names and "a policy cannot wait for more clients" in said.out
    assert not [name for name in names if name.startswith(("secagg", "private", "network"))]
    private = cli("plan", "check", tmp_path / "plan.toml", "--set", "secagg={}")
    assert "secagg-hides-clients" in private.out
    table = list(rules(network=False))
    assert said.out.splitlines()[-1].startswith(f"{len(names)} rules apply and are kept; {len(table) - len(names)} ")


def test_a_refused_plan_is_told_by_the_name_of_the_rule(cli: Any, tmp_path: Path) -> None:
    said = cli("plan", "check", written(tmp_path, "secagg = {}\n"), "--set", "detection=distance")
    assert said.code == 2 and not said.out
    assert said.err.startswith("error: detection compares single updates, which secure aggregation hides: leave it")
    assert said.err.rstrip().endswith("(rule secagg-hides-clients)")
    assert not list(tmp_path.glob("runs"))


def test_what_no_rule_refuses_is_told_as_it_is(cli: Any, tmp_path: Path) -> None:
    said = cli("plan", "check", written(tmp_path), "--set", 'uplink=["half", "low_rank"]')
    assert said.code == 2 and "put low_rank earlier" in said.err and "(rule" not in said.err


def test_machines_get_json(cli: Any, tmp_path: Path) -> None:
    said = cli("plan", "check", written(tmp_path), "--json")
    told = json.loads(said.out)
    assert said.code == 0 and told["passed"] and told["refused"] is None
    assert [rule["name"] for rule in told["rules"]] == [rule.name for rule in rules(network=False)]
    assert {rule["name"] for rule in told["rules"] if rule["applies"]} >= {"policy-fits-clients", "rule-fits-cohort"}
    said = cli("plan", "check", tmp_path / "plan.toml", "--json", "--set", "policy.size=7")
    told = json.loads(said.out)
    assert said.code == 2 and not told["passed"]
    assert told["refused"]["rule"] == "policy-fits-clients"
    assert "make more clients with partition.num_clients" in told["refused"]["error"]


def test_a_plan_is_checked_for_a_network(cli: Any, tmp_path: Path) -> None:
    devices = ("--set", "devices=fleet")
    assert cli("plan", "check", written(tmp_path), *devices).code == 0
    said = cli("plan", "check", tmp_path / "plan.toml", "--clients", "5", *devices)
    assert said.code == 2 and "(rule network-simulates-nothing)" in said.err
    assert "network-simulates-nothing" in cli("plan", "check", tmp_path / "plan.toml", "--clients", "5").out
    few = cli("plan", "check", tmp_path / "plan.toml", "--clients", "3")
    assert few.code == 2 and "the federation has 3 clients" in few.err


def test_what_travels_is_listed(cli: Any, tmp_path: Path) -> None:
    """The bytes are those that a run then reports."""
    plan = written(tmp_path, 'algorithm = "fedper"\nmodel = {name = "mlp_2nn", hidden = 16}\n')
    said = json.loads(cli("plan", "travels", plan, "--json").out)
    goes = {each["name"]: (each["num_values"], each["goes"]) for each in said["values"]}
    assert goes["1.weight"] == (64 * 16, "both ways") and goes["5.weight"] == (160, "kept")
    assert cli("run", plan, "--out", tmp_path / "run").code == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["bytes_up"], row["bytes_down"]) == (4 * said["bytes_up"], 4 * said["bytes_down"])
    shown = cli("plan", "travels", plan).out
    assert "1,312 values travel both ways, 0 more down and 0 more up; a client keeps 170" in shown
    ditto = cli("plan", "travels", plan, "--set", "algorithm=ditto").out
    assert "memory of own" in ditto and "a client keeps 1,482" in ditto
    refused = cli("plan", "travels", plan, "--set", "algorithm=fedbn")
    assert refused.code == 2 and "fedbn lets clients keep 'norms'" in refused.err
