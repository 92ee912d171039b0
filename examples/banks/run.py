"""Four banks and a server, each a process of its own, over TLS, with secure aggregation. Run: make banks

Every command is printed as it would be typed in five terminals; docs/federation.md explains them.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from federation import run_federation  # noqa: E402

CLIENTS = {f"bank-{letter}": f"bank:client_{letter}" for letter in "abcd"}


def main() -> None:
    """Run the federation of bank.py by plan.toml."""
    accuracy = run_federation([HERE / "plan.toml", HERE / "bank.py"], CLIENTS, "banks")
    print(f"test accuracy {100 * accuracy:.2f} % of one model, and no loan has left its bank")


if __name__ == "__main__":
    main()
