"""The demo: FedAvg on non-IID MNIST, 100 clients with two digits each. Run: make demo"""

from pathlib import Path

import atoll
from atoll.core.errors import DataError
from atoll.core.parts import Part
from atoll.report.reading import human_bytes, human_seconds
from atoll.report.record import next_free

PLAN = Path(__file__).parent.parent / "recipes" / "demo.toml"


def data_at_hand() -> str:
    """MNIST, or the digits that come with Atoll where nothing can be downloaded."""
    try:
        Part("mnist").build("data.catalog")
    except DataError as error:
        print(f"MNIST cannot be had, so the demo uses the small digits data instead.\n({error})\n")
        return "digits"
    return "mnist"


def main() -> None:
    """Train, then show what came out and what to try next."""
    plan = atoll.Plan.from_toml(PLAN.read_text()).replace({"data": data_at_hand()})
    out = next_free(Path("runs"), "demo")
    result = atoll.run(plan, out=out, progress=True)
    last = result.history[-1]
    clients = last["clients_test"]
    print(f"""
After {last["round"]} rounds in {human_seconds(last["seconds"])}, with no client's data ever leaving it:
  test accuracy        {100 * result.accuracy:.2f} %
  clients' own data    {100 * clients["mean"]:.1f} % on average, worst tenth {100 * clients["worst_decile"]:.1f} %
  sent                 {human_bytes(last["bytes_up"])} up, {human_bytes(last["bytes_down"])} down

Look at the report:  {out / "report.html"}

Try next:
  .venv/bin/atoll run recipes/demo.toml --ui        the same with a live page in the browser
  .venv/bin/atoll run recipes/demo.toml --set algorithm=fedprox --set algorithm.mu=0.1
  .venv/bin/atoll run recipes/demo.toml --set partition=iid --set partition.num_clients=100
  .venv/bin/atoll report runs/*        compare them on one page
  .venv/bin/python examples/quickstart.py""")


if __name__ == "__main__":
    main()
