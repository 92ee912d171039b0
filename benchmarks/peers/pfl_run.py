# ruff: noqa: E402 (the other ranks start before the slow imports, so that theirs run at the same time)
"""The same job on pfl-research: FederatedAveraging on a SimulatedBackend with in-memory PyTorch users.

What makes it fast on a CPU: one process a core, joined by torch.distributed as pfl documents it (PFL_WORKER_ADDRESSES),
with one torch thread each; user datasets that are made once, for each keeps its batches; no metrics of users; and no
weighting, for all clients have equally many samples.
"""

import argparse
import os
import socket
import subprocess
import sys


def add_processes(parser):
    parser.add_argument("--processes", type=int, default=os.cpu_count())


def start_other_ranks():
    """Become rank 0 of --processes and start the others; pfl joins their group when it is imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_processes(parser)
    processes = parser.parse_known_args()[0].processes
    if processes == 1 or "PFL_WORKER_RANK" in os.environ or {"-h", "--help"} & set(sys.argv):
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port + rank}" for rank in range(processes))
    os.environ["PFL_WORKER_RANK"] = "0"
    return [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "PFL_WORKER_RANK": str(rank)})
        for rank in range(1, processes)
    ]


OTHERS = start_other_ranks() if __name__ == "__main__" else []

import importlib.metadata
import time
import warnings

import numpy as np
import torch
from common import arguments, build_model, clients_of, count_correct, peak_rss_mb, report, samples
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F


class Stopwatch(TrainingProcessCallback):
    """Takes each round's time and, with a target, tests the model between the rounds."""

    def __init__(self, net, x_test, y_test, target):
        self.net, self.x_test, self.y_test, self.target = net, x_test, y_test, target
        self.seconds = []

    def accuracy(self):
        """Every rank tests its part of the test set."""
        mine = distributed.distribute_range(len(self.y_test))
        part = slice(mine.start, mine.stop)
        correct = torch.tensor([float(count_correct(self.net, self.x_test[part], self.y_test[part]))])
        return float(distributed.all_reduce([correct])[0]) / len(self.y_test)

    def on_train_begin(self, *, model):
        self.first_round_at, self.begin = time.time(), time.perf_counter()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.seconds.append(time.perf_counter() - self.begin)
        reached = self.target is not None and self.accuracy() >= self.target
        self.begin = time.perf_counter()
        return reached, Metrics()


def cohorts(args):
    """Client ids, cohort after cohort, none twice in a cohort; all ranks draw the same."""
    rng = np.random.default_rng(args.seed)
    while True:
        yield from rng.choice(args.num_clients, args.cohort, replace=False).tolist()


def main():
    args = arguments(__doc__, add_processes)
    if args.cohort % args.processes:
        sys.exit(f"--cohort {args.cohort} must be a multiple of --processes {args.processes}: each trains equally many")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*reduce_op")  # pfl uses the old name
    torch.set_num_threads(args.threads or max(1, os.cpu_count() // args.processes))
    np.random.seed(args.seed)  # pfl wants the same global seed in all ranks
    net = build_model(args.model, args.seed)
    net.loss = lambda x, y: F.cross_entropy(net(x), y)
    net.metrics = lambda x, y: {}  # pfl would evaluate every user of the first round otherwise
    users = [PyTorchTensorDataset(data, user_id=str(i)) for i, data in enumerate(clients_of(args))]
    dataset = FederatedDataset(users.__getitem__, cohorts(args).__next__)
    watch = Stopwatch(net, *samples(args.data, args.dataset, "t10k"), args.target)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.rounds + 1,
            train_cohort_size=args.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        PyTorchModel(net, torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=args.batch_size, local_num_epochs=args.epochs, local_learning_rate=args.lr),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    ended_at, peak, accuracy = time.time(), peak_rss_mb(), watch.accuracy()
    if distributed.global_rank == 0:
        version = importlib.metadata.version("pfl")
        report("pfl", version, args, watch.seconds, watch.first_round_at, ended_at, accuracy, peak)
    for other in OTHERS:
        other.wait()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
