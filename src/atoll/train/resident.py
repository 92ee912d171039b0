"""The most memory that processes had, as the system tells it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path


def peak_memory(pid: int | None) -> int:
    """Return the most bytes that a process had in memory; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Set the peak memory of this process back to what it holds now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def own_peak_memory() -> int:
    """Return the most bytes that this process had in memory since `forget_peak`, or ever where that is not known."""
    unit = 1 if sys.platform == "darwin" else 1024
    return peak_memory(os.getpid()) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
