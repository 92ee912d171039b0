"""Split learning between two laboratories and a server, each a process of its own, over TLS on this machine.

Run: python examples/split/run.py. Every command is printed as it would be typed in three terminals; docs/split.md and
docs/federation.md explain them.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from federation import run_federation  # noqa: E402

CLIENTS = {"north": "laboratory:north", "south": "laboratory:south"}


def main() -> None:
    """Run the federation of laboratory.py by plan.toml."""
    accuracy = run_federation([HERE / "plan.toml", HERE / "laboratory.py"], CLIENTS, "laboratories")
    print(
        f"test accuracy {100 * accuracy:.2f} % of one model, and neither a sample nor a label has left its laboratory"
    )


if __name__ == "__main__":
    main()
