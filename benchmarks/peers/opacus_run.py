"""DP-SGD with Opacus: one client holds all samples; batches are drawn by Poisson sampling and steps are timed.

`--mode` is Opacus' way to per-sample gradients or their norms. `--batches loader` takes batches from Opacus' own data
loader; `gathered` draws them with the same coins but gathers them by one index, as a quick training loop would.
"""

import json
import time
import warnings

import opacus
import torch
from common import arguments, build_model, mnist
from torch import nn


def forever(loader):
    while True:
        yield from loader


def gathered(x, y, rate):
    while True:
        picked = (torch.rand(len(x)) < rate).nonzero().flatten()
        yield x[picked], y[picked]


def main():
    def extend(parser):
        parser.add_argument("--mode", choices=["hooks", "functorch", "ew", "ghost"], default="ghost")
        parser.add_argument("--batches", choices=["loader", "gathered"], default="gathered")
        parser.add_argument("--steps", type=int, default=50, help="steps a round")

    args = arguments(__doc__, extend)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    x, y = mnist(args.data, "train")
    model, criterion = build_model(args.model, args.seed), nn.CrossEntropyLoss()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=args.batch_size)
    private = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr),
        data_loader=loader,
        criterion=criterion,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
        grad_sample_mode=args.mode,
    )
    if args.mode == "ghost":
        model, optimizer, criterion, loader = private
    else:
        model, optimizer, loader = private
    batches = forever(loader) if args.batches == "loader" else gathered(x, y, args.batch_size / len(x))
    seconds = []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        for _, (xb, yb) in zip(range(args.steps), batches, strict=False):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
        seconds.append((time.perf_counter() - begin) / args.steps)
    print(json.dumps({"step_seconds": seconds, "version": opacus.__version__}))


if __name__ == "__main__":
    main()
