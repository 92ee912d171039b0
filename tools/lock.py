"""Write a requirements file with the hash of every package that Atoll needs, from a report of pip.

    pip install --dry-run --ignore-installed --report report.json --constraint constraints.txt .
    python tools/lock.py report.json > requirements.lock
    pip install --require-hashes --no-deps --requirement requirements.lock
    pip install --no-deps .

The hashes are those of the files that pip would install on this machine from the index that it is set up for. They
differ by platform, Python and index (torch for CPUs is not the file of PyPI), so that each operator makes the file
once, keeps it with its configuration, and installs every machine of a kind from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def locked(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each package of a report that comes as a file; the project itself has none."""
    lines = []
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if "dir_info" in item["download_info"]:
            continue
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise SystemExit(f"the report has no SHA-256 of {name} {version}: make it with pip 23.1 or later")
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/lock.py report.json > requirements.lock")
    print("\n".join(locked(json.loads(Path(sys.argv[1]).read_text()))))
