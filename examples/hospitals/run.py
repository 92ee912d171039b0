"""Two hospitals and a server, each a process of its own, over TLS on this machine. Run: make federation

Every command is printed as it would be typed in three terminals; docs/federation.md explains them.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from federation import run_federation  # noqa: E402

CLIENTS = {"hospital-a": "hospital:client_a", "hospital-b": "hospital:client_b"}


def main() -> None:
    """Run the federation of hospital.py by plan.toml."""
    accuracy = run_federation([HERE / "plan.toml", HERE / "hospital.py"], CLIENTS, "hospitals")
    print(f"test accuracy {100 * accuracy:.2f} % of one model, and no sample has left its hospital")


if __name__ == "__main__":
    main()
