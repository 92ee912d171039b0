"""Tests on the pretend device, in a process of their own: torch forgets no device that it was told of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = ("engine/test_places.py", "engine/test_pretend_device.py")


FAST = ("-m", "not slow", "-k", "an_algorithm or planted or halved")
"""One path through every layer, and that mixed devices are found."""


@pytest.mark.parametrize(
    "which", [FAST, pytest.param(("-m", "not slow or slow"), marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_devices_in_a_process_of_their_own(which: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "--tb=short", *which, *FILES]
    done = subprocess.run(command, cwd=TESTS, env={**os.environ, "ATOLL_PRETEND": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
