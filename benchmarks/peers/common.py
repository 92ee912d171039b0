"""What every peer run shares: data, partition, models, command line and the one JSON line of results.

The runs differ only in the system that trains, so each system's script holds its own code and nothing else. Needs NumPy
and PyTorch; imports nothing of Atoll.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

IMPORTED_AT = time.time()


def arguments(description, extend=lambda parser: None):
    """Parse the command line that all peer runs accept; `extend` may add what only one of them has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="folder with the data set, as `samples` reads it")
    parser.add_argument("--dataset", choices=["mnist", "cifar10"], default="mnist")
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp_2nn")
    parser.add_argument("--num-clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--partition", choices=["iid", "shards"], default="iid")
    parser.add_argument("--samples-per-client", type=int, default=0, help="keep at most so many (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: what suits the system best)")
    parser.add_argument("--target", type=float, help="test every round and stop at this accuracy")
    extend(parser)
    args = parser.parse_args()
    if not 0 < args.cohort <= args.num_clients:
        parser.error(f"--cohort {args.cohort} must be between 1 and --num-clients {args.num_clients}")
    return args


def read_idx(path):
    """Read one idx file of bytes: two zero bytes, type 8, the number of dimensions, the dimensions, the values."""
    raw = Path(path).read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes; unpack it if it is compressed")
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def mnist(folder, split):
    """Images as float32 rows in [0, 1] and labels as int64; split is "train" or "t10k"."""
    images = read_idx(Path(folder) / f"{split}-images-idx3-ubyte")
    labels = read_idx(Path(folder) / f"{split}-labels-idx1-ubyte")
    x = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
    return x, torch.from_numpy(labels.astype(np.int64))


def samples(folder, dataset, split):
    """Samples as float32 in [0, 1] and labels as int64; split is "train" or "t10k".

    MNIST lies there as the four idx files, not compressed; CIFAR-10 as NumPy's x_train.npy of shape (50000, 3, 32, 32),
    y_train.npy, x_t10k.npy and y_t10k.npy, of bytes.
    """
    if dataset == "mnist":
        return mnist(folder, split)
    x, y = (np.load(Path(folder) / f"{name}_{split}.npy", allow_pickle=False) for name in "xy")
    return torch.from_numpy(x.astype(np.float32) / 255), torch.from_numpy(y.astype(np.int64))


def partition(labels, num_clients, kind, seed, cap=0):
    """Index arrays of equal length, one a client: "iid", or "shards" (two label-sorted shards each, McMahan 2017)."""
    rng = np.random.default_rng(seed)
    pieces = num_clients * (2 if kind == "shards" else 1)
    size = len(labels) // pieces
    order = np.argsort(labels, kind="stable") if kind == "shards" else rng.permutation(len(labels))
    parts = order[: pieces * size].reshape(pieces, size)
    if kind == "shards":
        parts = rng.permuted(parts[rng.permutation(pieces)].reshape(num_clients, 2 * size), axis=1)
    return list(parts[:, :cap] if cap else parts)


@functools.lru_cache(maxsize=1)  # a Ray actor calls this for every client: load once a process
def client_data(folder, dataset, num_clients, kind, seed, cap):
    """Each client's (x, y) tensors, ready to train on."""
    x, y = samples(folder, dataset, "train")
    return [(x[part], y[part]) for part in partition(y.numpy(), num_clients, kind, seed, cap)]


def clients_of(args):
    return client_data(args.data, args.dataset, args.num_clients, args.partition, args.seed, args.samples_per_client)


def cnn_mcmahan():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def cnn_cifar():
    """The CNN of pfl's CIFAR-10 benchmark: 1,626,442 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


MODELS = {
    "logistic": lambda: nn.Sequential(nn.Linear(784, 10)),
    "mlp_2nn": lambda: nn.Sequential(
        nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    ),
    "cnn_mcmahan": cnn_mcmahan,
    "cnn_cifar": cnn_cifar,
}


def build_model(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]()


@torch.no_grad()
def count_correct(model, x, y):
    return sum(int((model(xb).argmax(1) == yb).sum()) for xb, yb in zip(x.split(1000), y.split(1000), strict=True))


def process_start():
    """Wall-clock time at which this process began: ATOLL_BENCH_START if the caller set it, else the kernel's record."""
    if "ATOLL_BENCH_START" in os.environ:
        return float(os.environ["ATOLL_BENCH_START"])
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return IMPORTED_AT


def peak_rss_mb():
    """Sum of the peak resident sizes of this process and its living descendants (shared pages count in each)."""
    parents, peaks = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # ended meanwhile
            continue
        parents[int(fields["Pid"])] = int(fields["PPid"])
        peaks[int(fields["Pid"])] = int(fields.get("VmHWM", "0 kB").split()[0]) / 1024
    family = [os.getpid()]
    for pid in family:  # grows while it is walked
        family += [child for child, parent in parents.items() if parent == pid]
    return round(sum(peaks[pid] for pid in family), 1)


def report(system, version, args, round_seconds, first_round_at, ended_at, accuracy, peak_mb):
    """Print the result as one JSON line on stdout and a summary on stderr."""
    start = process_start()
    result = {
        "system": system,
        "version": version,
        "model": args.model,
        "round_seconds": [round(seconds, 5) for seconds in round_seconds],
        "startup_seconds": round(first_round_at - start, 3),
        "total_seconds": round(ended_at - start, 3),
        "final_accuracy": round(accuracy, 4),
        "peak_rss_mb": peak_mb,
    }
    median = statistics.median(round_seconds)
    print(f"{system} {args.model}: median round {median:.4f} s, accuracy {accuracy:.4f}", file=sys.stderr)
    print(json.dumps(result), flush=True)
