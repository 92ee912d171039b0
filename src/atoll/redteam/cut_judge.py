"""Judge what probes made of what crosses a cut. Shapes: N samples of a task, in the order in which they were sent.

Guesses about single samples are in their order, so that none must be matched. The task that is laid open most counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.core.probe import SAMPLE_LABELS, Guess, Samples
from atoll.redteam.attribute_judge import attributes_of
from atoll.redteam.image_judge import SHARP, psnr, ssim
from atoll.redteam.judges import SHOWN, Judged, drawn
from atoll.redteam.membership_judge import auc
from atoll.report.redteam import Picture
from atoll.simulation.cut_seat import CutWatched
from atoll.split.correlation import LEAST_ROWS, Dependence, dependence

READABLE = 20.0
"""The mean PSNR, in dB, from which samples count as laid open: digits can be read, and faces recognised."""
MOST_ROWS = 1000
"""Different samples of a task at most whose distance correlation with activations is measured."""


def judge_cut(goal: str, watched: CutWatched, guesses: Sequence[Guess]) -> Judged | None:
    """Return how much guesses tell; None if there is nothing to judge."""
    about = [(guess, watched.truths[guess.row]) for guess in guesses if guess.row is not None]
    if goal == SAMPLE_LABELS:
        return _labels(watched, about)
    is_table = len(watched.known.input_shape) == 1
    return _columns(watched, about) if is_table else _samples(watched, about)


def correlation_of(watched: CutWatched) -> Dependence | None:
    """Return how much activations of a task depend on its samples, of the task where that is most; None if too few."""
    found = list[Dependence]()
    for sight, true in zip(watched.sights, watched.truths, strict=True):
        first = sight.batch_N.new_tensor(_first_places(true.x))[:MOST_ROWS]
        if len(first) >= LEAST_ROWS:
            found.append(dependence(true.x[first], sight.activations_N[first]))
    return max(found, key=lambda each: each.squared, default=None)


def _first_places(x: Tensor) -> list[int]:
    """Return where each different sample comes for the first time."""
    return sorted(np.unique(x.flatten(1).numpy(), axis=0, return_index=True)[1].tolist())


def _samples(watched: CutWatched, about: Sequence[tuple[Guess, Samples]]) -> Judged | None:
    """Compare samples with guesses one by one: the mean PSNR of a task, beside a blank sample and the mean one."""
    known, best = watched.known, None
    span = known.high - known.low
    mean = known.elsewhere.x.mean(0)
    for guess, true in about:
        if guess.x is None or not len(guess.x):
            continue
        x = true.x[: len(guess.x)]
        reached_N = psnr(guess.x, x, span)
        blank = float(psnr(torch.full_like(x, (known.low + known.high) / 2), x, span).mean())
        floor = max(blank, float(psnr(mean.expand_as(x), x, span).mean()))
        gain = float(reached_N.mean()) - floor
        if best is None or gain > best[0]:
            best = gain, guess, x, reached_N, blank, floor
    if best is None:
        return None
    _, guess, x, reached_N, blank, floor = best
    assert guess.x is not None
    alike_N = ssim(guess.x, x, span) if x.dim() == 4 else torch.zeros(len(x))
    order = reached_N.argsort(descending=True)[:SHOWN].tolist()
    return Judged(
        figures={
            "mean PSNR in dB": float(reached_N.mean()),
            "best PSNR in dB": float(reached_N.max()),
            "mean SSIM": float(alike_N.mean()),
            "share of samples above 30 dB": float((reached_N >= SHARP).double().mean()),
            "mean dB of a blank one": blank,
            "mean dB of the mean one": float(psnr(mean.expand_as(x), x, span).mean()),
            **_correlations(watched),
        },
        floor=floor,
        margin=1.0,
        open_from=READABLE,
        pictures=tuple(
            Picture(
                drawn(x[n], known.low, known.high),
                drawn(guess.x[n], known.low, known.high),
                float(reached_N[n]),
                float(alike_N[n]),
            )
            for n in order
        ),
    )


def _columns(watched: CutWatched, about: Sequence[tuple[Guess, Samples]]) -> Judged | None:
    """Compare columns of a table: the share of values that are right, beside the usual values, and what is explained.

    Columns with few values are right if the guess is nearest to the true value; of others the share of their variance
    that guesses explain counts.
    """
    known = watched.known
    best: tuple[float, float, float] | None = None
    own = known.elsewhere.x
    named = attributes_of(own)
    said = {column for attribute in named for column in attribute.columns_F.tolist()}
    numbers = [column for column in range(own.shape[1]) if column not in said and float(own[:, column].std()) > 0]
    for guess, true in about:
        if guess.x is None or not len(guess.x):
            continue
        x = true.x[: len(guess.x)]
        right = [float((each.of(guess.x) == each.of(x)).double().mean()) for each in named]
        usual = [float((each.of(x) == each.of(own).mode().values).double().mean()) for each in named]
        error, spread = (guess.x - x)[:, numbers].double(), (x - own.mean(0))[:, numbers].double()
        explained = 1 - float(error.square().sum() / spread.square().sum().clamp(min=1e-12)) if numbers else math.nan
        said_right = (float(np.mean(right)), float(np.mean(usual))) if named else (explained, 0.0)
        if best is None or said_right[0] - said_right[1] > best[0] - best[1]:
            best = (*said_right, explained)
    if best is None:
        return None
    right_share, floor, explained = best
    also = {"share of variance explained": explained} if numbers else {}
    if not named:
        return Judged({**also, **_correlations(watched)}, floor=0.0, margin=0.1, open_from=0.9)
    figures = {"share of values right": right_share, "share right by the usual values": floor}
    open_from = max(0.9, (1 + floor) / 2)
    return Judged({**figures, **also, **_correlations(watched)}, floor=floor, margin=0.05, open_from=open_from)


def _correlations(watched: CutWatched) -> dict[str, float]:
    found = correlation_of(watched)
    return {} if found is None else {"distance correlation": found.dcor, "bias-corrected square": found.squared}


def _labels(watched: CutWatched, about: Sequence[tuple[Guess, Samples]]) -> Judged | None:
    """Compare labels: the AUC of two classes beside 0.5, or the share that is right beside the usual label."""
    known = watched.known
    if len(known.labels_K) == 2:
        scored = [
            (g.score_N, t.y.flatten() == known.labels_K[1], None if g.y is None else g.y == known.labels_K[1])
            for g, t in about
            if g.score_N is not None
        ]
        if scored:
            return _scored(watched, scored)
    rows = list[tuple[float, float]]()
    for guess, true in about:
        if guess.y is not None and true.y.shape[:1] == guess.y.shape[:1] and true.y.dim() == 1:
            usual = known.elsewhere.y.mode().values
            rows.append((float((guess.y == true.y).double().mean()), float((true.y == usual).double().mean())))
    if not rows:
        return None
    right, floor = max(rows, key=lambda row: row[0] - row[1])
    figures = {"share of labels right": right, "share right by the usual label": floor}
    return Judged(figures, floor=floor, margin=0.05, open_from=0.9)


def _scored(watched: CutWatched, scored: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Judged | None:
    """Judge scores of all tasks together; where a probe does not name labels, as many are taken as are usual."""
    score_N, second_N = torch.cat([each[0] for each in scored]), torch.cat([each[1] for each in scored])
    ins, outs = int(second_N.sum()), int((~second_N).sum())
    if not ins or not outs:
        return None
    positive = watched.known.elsewhere.y.flatten() == watched.known.labels_K[1]
    cut = torch.quantile(score_N, 1 - float(positive.double().mean()))
    named = [each[2] for each in scored if each[2] is not None]
    taken_N = torch.cat(named) if len(named) == len(scored) else score_N > cut
    return Judged(
        figures={
            "AUC": auc(score_N, second_N),
            "share of labels right": float((taken_N == second_N).double().mean()),
            "share right by the usual label": max(ins, outs) / (ins + outs),
            "AUC of guessing": 0.5,
        },
        floor=0.5,
        margin=max(0.02, 3 * math.sqrt((ins + outs + 1) / (12 * ins * outs))),
        open_from=0.8,
        by_luck=True,
    )
