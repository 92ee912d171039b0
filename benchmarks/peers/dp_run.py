"""The same steps on Atoll, private or not, through its public interface."""

import json

from common import arguments

import atoll


def main():
    def extend(parser):
        parser.add_argument("--private", action="store_true")
        parser.add_argument("--engine", choices=["inline", "vectorised"], default="vectorised")
        parser.add_argument("--steps", type=int, default=50, help="steps a round")

    args = arguments(__doc__, extend)
    plan = atoll.Plan(
        data="mnist",
        partition={"name": "iid", "num_clients": 1},
        policy={"size": 1},
        model=args.model,
        local={"steps": args.steps, "batch_size": args.batch_size, "lr": args.lr},
        rounds=args.rounds + 1,
        evaluation={"every": 0},
        engine=args.engine,
        privacy={"name": "sample", "clip": 1.0, "sigma": 1.1, "delta": 1e-5} if args.private else None,
    )
    rows = atoll.run(plan, progress=False).history[:-1]  # the last round's time holds the evaluation
    print(json.dumps({"step_seconds": [row["round_seconds"] / args.steps for row in rows]}))


if __name__ == "__main__":
    main()
