"""Vertical learning of a bank and a shop: records are joined, and a model is trained, by processes on this machine.

Run: python examples/vertical/run.py. Every command is printed as it would be typed in three terminals; docs/vertical.md
and docs/federation.md explain them. The tables are made up by make_data.py.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from federation import Terminals, run_federation  # noqa: E402
from parties import BANK, dataset  # noqa: E402

import atoll  # noqa: E402

CLIENTS = {"bank": "parties:bank", "shop": "parties:shop"}
FILES = ("plan.toml", "parties.py", "bank.csv", "shop.csv", "test.csv")


def join_records(terminals: Terminals) -> None:
    """Let both parties find their common rows, through a folder that both can reach."""
    (terminals.directory / "shared").mkdir()
    (terminals.directory / "secret").write_text(os.urandom(32).hex())
    common = "--column customer --through shared --secret-file secret --workers 1"
    shop = terminals.started("shop", f"align shop.csv {common} --as shop --asked-by bank --out shop-aligned")
    terminals.done("bank", f"align bank.csv {common} --as bank --ask shop --out bank-aligned")
    if shop.wait(60):
        raise SystemExit("the shop could not join its records: see above")


def alone(directory: Path) -> float:
    """Return the accuracy of a model that the bank trains on its own columns of the same rows."""
    os.chdir(directory)
    result = atoll.run(
        atoll.Plan(
            rounds=15,
            data=dataset("bank-aligned/bank.csv", "test.csv", BANK),
            partition={"name": "iid", "num_clients": 1},
            model={"name": "mlp", "widths": [16]},
            local={"epochs": 1, "batch_size": 32, "lr": 0.01, "optimizer": "adam"},
        )
    )
    accuracy: float = result.test["accuracy"]
    return accuracy


def main() -> None:
    """Join the tables, run the federation of parties.py by plan.toml, and compare."""
    directories: list[Path] = []

    def before(terminals: Terminals) -> None:
        directories.append(terminals.directory)
        join_records(terminals)

    accuracy = run_federation([HERE / name for name in FILES], CLIENTS, "customers", before)
    print(f"test accuracy {100 * accuracy:.2f} % of one model, and no column has left its party")
    print(f"the bank alone: {100 * alone(directories[0]):.2f} %")


if __name__ == "__main__":
    main()
