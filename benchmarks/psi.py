"""Seconds of a private set intersection of two parties, and who takes them.

python benchmarks/psi.py [ids of each party] [processes]

Half of the ids are common. Both parties run on this machine, one after the other; between two machines each does its
half at home. Processor time beside wall time says how busy the machine was.
"""

from __future__ import annotations

import os
import resource
import sys
import time

from atoll.alignment.local import align
from atoll.alignment.workers import spread_over


def processor_seconds() -> float:
    """Return processor time of this process and of its children that have ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main(num: int = 100_000, workers: int = 0) -> None:
    a = [f"patient {number}" for number in range(num)]
    b = [f"patient {number}" for number in range(num // 2, num + num // 2)]
    started, used = time.perf_counter(), processor_seconds()
    with spread_over(workers or len(os.sched_getaffinity(0))) as spread:
        found = align({"bank": a, "shop": b}, "bank", spread=spread)
    wall, used = time.perf_counter() - started, processor_seconds() - used
    assert found.sizes == {"shop": num - num // 2}
    print(f"{num:,} ids each: {wall:.1f} s, {used:.1f} s of processors, {found.num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
