"""The same job on Flower's simulation: a ClientApp and a ServerApp with its FedAvg strategy, on Ray.

What makes it fast on a CPU: one client a core (num_cpus=1), one torch thread each; data, model and code that stay in
the actor's process instead of travelling with every task; no evaluation by clients; and a warm-up before the first
round, so that the rounds do not pay for the start of Ray and the actors.
"""

import contextlib
import functools
import importlib.metadata
import os
import random
import time

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # read when the packages are imported
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning on machines without a GPU

import torch
from common import arguments, build_model, client_data, count_correct, peak_rss_mb, report, samples
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

client_app = ClientApp()
model_of = functools.cache(build_model)


class TargetReached(Exception):
    """Ends a run early: the strategy has no other way to stop before its last round."""


def prepare(config):
    """This process's copy of the model and of all clients' data; made at the first call."""
    torch.set_num_threads(config["threads"])
    keys = ("data", "dataset", "num_clients", "partition", "seed", "samples_per_client")
    return model_of(config["model"], config["seed"]), client_data(*(config[key] for key in keys))


@client_app.query()
def warm_up(message, context):
    prepare(message.content["config"])
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # PyTorch's first optimizer imports for a second
    return Message(RecordDict(), reply_to=message)


@client_app.train()
def train(message, context):
    config = message.content["config"]
    model, clients = prepare(config)
    x, y = clients[context.node_config["partition-id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(config["epochs"]):
        order = torch.randperm(len(x))
        for xb, yb in zip(x[order].split(config["batch_size"]), y[order].split(config["batch_size"]), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def server(args, config, outcome):
    """A ServerApp that warms the actors up, runs the rounds and leaves its measurements in `outcome`."""
    app = ServerApp()
    x_test, y_test = samples(args.data, args.dataset, "t10k")
    model = build_model(args.model, args.seed)

    def accuracy(arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        return count_correct(model, x_test, y_test) / len(y_test)

    def after_round(server_round, arrays):
        now = time.perf_counter()
        if server_round:
            outcome["seconds"].append(now - outcome["begin"])
            outcome["arrays"] = arrays
            if args.target and accuracy(arrays) >= args.target:
                raise TargetReached
        else:
            outcome["first_round_at"] = time.time()
        outcome["begin"] = time.perf_counter()

    @app.main()
    def main(grid, context):
        grid.pull_interval = 0.01  # the default of 0.1 s lengthens a short round by a tenth
        while len(nodes := list(grid.get_node_ids())) < args.num_clients:
            time.sleep(0.01)
        messages = [Message(RecordDict({"config": config}), node, "query") for node in nodes[: os.cpu_count()]]
        failed = [reply.error.reason for reply in grid.send_and_receive(messages) if reply.has_error()]
        if failed:
            raise RuntimeError(f"the warm-up of the actors failed: {failed[0]}")
        # int(num_clients * fraction) may round down, so the minimum states the cohort exactly
        strategy = FedAvg(args.cohort / args.num_clients, 0.0, min_train_nodes=args.cohort)
        with contextlib.suppress(TargetReached):
            strategy.start(
                grid,
                ArrayRecord(model.state_dict()),
                num_rounds=args.rounds,
                train_config=config,
                evaluate_fn=after_round,
            )
        outcome.update(ended_at=time.time(), peak=peak_rss_mb(), accuracy=accuracy(outcome["arrays"]))

    return app


def main():
    args = arguments(__doc__)
    random.seed(args.seed)
    args.data, args.threads = os.path.abspath(args.data), args.threads or 1
    config = ConfigRecord({key: value for key, value in vars(args).items() if value is not None})
    outcome = {"seconds": []}
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"logging_level": "warning"}}
    run_simulation(server(args, config, outcome), client_app, args.num_clients, backend_config=resources)
    timings = (outcome["seconds"], outcome["first_round_at"], outcome["ended_at"])
    report("flower", importlib.metadata.version("flwr"), args, *timings, outcome["accuracy"], outcome["peak"])


if __name__ == "__main__":
    import flower_run  # by its name, so that tasks refer to the client's code instead of carrying it

    flower_run.main()
