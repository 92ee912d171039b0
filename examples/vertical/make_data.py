"""Make the tables of this example up: nobody in them exists. Run: python examples/vertical/make_data.py.

A bank knows incomes and debts, a shop what is bought. Who pays late depends on both: on debts beside the income, and on
how much is spent and sent back. Of 1,000 customers each lacks some; `test.csv` has 300 others with all columns.
"""

import csv
import random
from pathlib import Path

HERE = Path(__file__).parent
NUM, NUM_TEST, SHARE = 1000, 300, 0.85
BANK, SHOP = ("age", "income", "debts", "late"), ("visits", "spent", "returned")


def customer(rng: random.Random) -> dict[str, int]:
    """Return all columns of one customer."""
    age, income = rng.randint(18, 80), max(12, round(rng.gauss(50, 15)))
    debts, visits = max(0, round(rng.gauss(20, 12))), rng.randint(1, 30)
    spent, returned = max(0, round(rng.gauss(25, 9) * visits)), min(visits, round(rng.expovariate(0.2)))
    risk = (debts - 20) / 12 - (income - 50) / 15 + (spent / visits - 25) / 6 + (returned - 5) / 3
    late = int(risk + rng.gauss(0, 0.8) > 0)
    return {"age": age, "income": income, "debts": debts, "late": late} | {
        "visits": visits, "spent": spent, "returned": returned}  # fmt: skip


def main() -> None:
    """Write bank.csv, shop.csv and test.csv."""
    rng = random.Random(7)
    known = {f"C{1000 + number}": customer(rng) for number in range(NUM)}
    for name, columns, spelt in (("bank", BANK, str.upper), ("shop", SHOP, str.lower)):
        held = [each for each in known if rng.random() < SHARE]
        rng.shuffle(held)
        write(name, ["customer", *columns], [[spelt(each), *(known[each][c] for c in columns)] for each in held])
    others = [customer(rng) for _ in range(NUM_TEST)]
    write("test", [*BANK, *SHOP], [list(each.values()) for each in others])


def write(name: str, head: list[str], rows: list[list[object]]) -> None:
    """Write a table."""
    with (HERE / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
