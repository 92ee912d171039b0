"""FedAvg as a plain PyTorch loop: one model, one client after the other, no framework."""

import time

import numpy as np
import torch
from common import arguments, build_model, clients_of, count_correct, peak_rss_mb, report, samples
from torch.nn import functional as F


def train_client(model, x, y, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        order = torch.randperm(len(x))  # shuffle once, then take views: cheaper than a gather for every batch
        for xb, yb in zip(x[order].split(args.batch_size), y[order].split(args.batch_size), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def train_round(model, state, clients, cohort, args):
    """Weighted average of the states that the cohort's clients reach from `state`."""
    total = sum(len(clients[c][0]) for c in cohort)
    mean = {name: torch.zeros_like(value) for name, value in state.items()}
    for c in cohort:
        model.load_state_dict(state)
        train_client(model, *clients[c], args)
        for name, value in model.state_dict().items():
            mean[name].add_(value, alpha=len(clients[c][0]) / total)
    return mean


def main():
    args = arguments(__doc__)
    if args.threads:
        torch.set_num_threads(args.threads)
    clients, (x_test, y_test) = clients_of(args), samples(args.data, args.dataset, "t10k")
    model = build_model(args.model, args.seed)
    rng = np.random.default_rng(args.seed)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    seconds, first_round_at = [], time.time()
    for _ in range(args.rounds):
        begin = time.perf_counter()
        state = train_round(model, state, clients, rng.choice(len(clients), args.cohort, replace=False), args)
        seconds.append(time.perf_counter() - begin)
        model.load_state_dict(state)
        if args.target and count_correct(model, x_test, y_test) >= args.target * len(y_test):
            break
    ended_at = time.time()
    accuracy = count_correct(model, x_test, y_test) / len(y_test)
    report("plain", torch.__version__, args, seconds, first_round_at, ended_at, accuracy, peak_rss_mb())


if __name__ == "__main__":
    main()
