"""What privacy of whole clients costs in time: the recipe mnist_2nn_iid with and without it, in turns.

    python benchmarks/privacy.py [TURNS]

Both runs ask the same clients in every round: the plain one draws them as the private one does, whose secret comes
from the seed. Counted are the processor's seconds of a round, without the first two and the last, which is tested.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from atoll import Plan, run
from atoll.core.events import Event, RoundCommitted
from atoll.core.sampler import Pick, Population, Sampler
from atoll.privacy.draws import secret_generator
from atoll.privacy.noise import derived
from atoll.rounds.samplers.poisson import poisson

RECIPE = Path(__file__).parents[1] / "recipes" / "mnist_2nn_iid.toml"
PRIVATE = {"name": "central", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "epsilon": 1000.0, "test_noise": True}


def as_private() -> Sampler:
    """Poisson sampling that picks the clients that the private run picks."""
    secret = derived((0).to_bytes(32, "big"), "test noise")

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        return poisson().sample(secret_generator(derived(secret, "cohort", population.attempt)), num, population)

    return poisson()._replace(sample=sample)


def seconds_a_round(plan: Plan) -> float:
    """The processor's seconds of a round, of the middle of a run."""
    marks: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, RoundCommitted) and not event.again:
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run(plan, out=Path(folder) / "run", watch=[note], report=False)
    return statistics.median(np.diff(marks[1:-1]).tolist())


def main(turns: int = 5) -> None:
    plain = Plan.from_toml(RECIPE.read_text()).replace(
        {"sampler": "poisson", "rounds": 24, "stop": {}, "evaluation.every": 0, "engine": {"name": "vectorised"}}
    )
    private = plain.replace({"privacy": PRIVATE})
    plain = plain.replace({"sampler": as_private})
    ratios = []
    for _ in range(turns):
        without, protected = seconds_a_round(plain), seconds_a_round(private)
        ratios.append(protected / without)
        print(f"a round {1e3 * without:.1f} ms, private {1e3 * protected:.1f} ms: {ratios[-1]:.3f}x", flush=True)
    print(f"median {statistics.median(ratios):.3f}x of {turns} turns")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
