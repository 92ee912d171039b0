"""The same job on Atoll, through its public interface."""

import importlib.metadata
import time

from common import arguments, peak_rss_mb, report

import atoll
from atoll.events import RoundCommitted, RunEnded, RunStarted


class Stopwatch:
    """Notes when the first round begins and how long the rounds take."""

    def __init__(self):
        self.seconds = []

    def __call__(self, event):
        match event:
            case RunStarted():
                self.first_round_at = time.time()
            case RoundCommitted(row=row, again=False):
                self.seconds.append(row["round_seconds"])
            case RunEnded():
                self.ended_at, self.peak = time.time(), peak_rss_mb()


def main():
    args = arguments(__doc__, lambda parser: parser.add_argument("--engine", default="auto"))
    partition = {"name": args.partition, "num_clients": args.num_clients}
    if args.samples_per_client:
        partition["samples_per_client"] = args.samples_per_client
    plan = atoll.Plan(
        data=args.dataset,
        partition=partition,
        model=args.model,
        local={"epochs": args.epochs, "batch_size": args.batch_size, "lr": args.lr},
        policy={"size": args.cohort},
        rounds=args.rounds,
        seed=args.seed,
        evaluation={"every": 1 if args.target else 0},
        stop={"accuracy": args.target} if args.target else {},
        engine=args.engine,
    )
    watch = Stopwatch()
    result = atoll.run(plan, watch=[watch])
    # The last round's time holds the evaluation that a plan always ends with; the others train alone.
    seconds = watch.seconds[: None if args.target else -1]
    version = importlib.metadata.version("atoll")
    report("atoll", version, args, seconds, watch.first_round_at, watch.ended_at, result.accuracy, watch.peak)


if __name__ == "__main__":
    main()
