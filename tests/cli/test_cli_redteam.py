"""`atoll redteam`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAN = """
engine = "inline"
model = {name = "mlp_2nn", hidden = 64}
partition = {num_clients = 12, samples_per_client = 4}
policy = {size = 4}
local = {steps = 1, batch_size = "all"}
"""


def test_the_command_writes_its_findings(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    said = cli("redteam", tmp_path / "plan.toml", "--probes", "linear_leak,token_bag", "--out", tmp_path / "found.json")
    assert said.code == 0 and "the server sees in 2 rounds 8 updates of single clients" in said.out
    found = {each["probe"]: each for each in json.loads((tmp_path / "found.json").read_text())["findings"]}
    assert found["linear_leak"]["figures"]["best PSNR in dB"] > 100
    assert found["token_bag"]["why_not"] and not found["token_bag"]["figures"]
    refused = cli("redteam", tmp_path / "plan.toml", "--probes", "nonsense")
    assert refused.code == 2 and "known are" in refused.err


def test_a_directory_gets_a_page_beside_the_findings(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    said = cli("redteam", tmp_path / "plan.toml", "--probes", "linear_leak", "--out", tmp_path / "out")
    assert said.code == 0 and "s left   linear_leak: samples" in said.err
    page, plain = (tmp_path / "out" / "redteam.html").read_text(), (tmp_path / "out" / "redteam.json").read_text()
    assert "data:image/png;base64," in page and json.loads(plain)["findings"][0]["pictures"] > 0
    assert "Only linear_leak were asked for" in page
