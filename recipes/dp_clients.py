"""How accuracy grows with the number of clients at one epsilon: the same data in more hands.

    python recipes/dp_clients.py [NUM_CLIENTS ...]

Rounds, share of the clients and noise are those of dp_clients_mnist.toml, and so is epsilon: it does not depend on how
many clients there are, but the noise on their mean falls as one over their number.
"""

from __future__ import annotations

import sys
from pathlib import Path

from atoll import Plan, run

RECIPE = Path(__file__).parent / "dp_clients_mnist.toml"


def main(numbers: list[int]) -> None:
    """Run the recipe with each number of clients, and print a row for each."""
    plan = Plan.from_toml(RECIPE.read_text())
    print("| clients | samples each | epsilon | test accuracy |\n|---|---|---|---|", flush=True)
    for number in numbers:
        result = run(plan.replace({"partition.num_clients": number, "evaluation.every": 0}))
        spent = result.history[-1]["privacy"]["epsilon"]
        print(f"| {number:,} | {60_000 // number} | {spent:.2f} | {100 * result.accuracy:.2f} % |", flush=True)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [100, 300, 1000, 3000])
