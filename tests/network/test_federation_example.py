"""The example, as `make federation` runs it: real processes, real data, a clean end."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from laws.golden_plans import FILE, machine

SCRIPT = Path(__file__).parents[2] / "examples" / "hospitals" / "run.py"


@pytest.mark.slow
def test_two_hospitals_and_a_server(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"test accuracy ([\d.]+) %", done.stdout)
    assert found is not None and float(found[1]) > 95
    base = tmp_path / "runs" / "federation-1"
    assert "Traceback" not in (base / "server.log").read_text() + done.stderr
    server, client = (base / home / "runs/hospitals/ledger.jsonl" for home in ("server", "hospital-a"))
    assert server.read_text() == client.read_text() and len(client.read_text().splitlines()) == 12
    assert (base / "server/runs/hospitals/report.html").exists()
    model = (base / "server/runs/hospitals/model.safetensors").read_bytes()
    recorded = json.loads(FILE.read_text())["hospitals"].get(machine())
    assert recorded in (None, hashlib.sha256(model).hexdigest()[:16])
