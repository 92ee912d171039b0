"""Judges: how much guesses tell, beside what needs no attack. Shapes: N samples, K classes, C candidates, R rows.

The largest figure over all rows counts, not the mean: one client that is laid open is one too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.probe import Guess, Samples
from atoll.redteam.image_judge import SHARP, match, psnr
from atoll.redteam.membership_judge import auc, membership_verdict, most_candidates
from atoll.report.redteam import NOTHING, OPEN, SOME, Picture, Text
from atoll.simulation.seat import Truth, Watched, samples_of

MAX_TRUE = 256
"""Samples of one row that guesses are compared with."""
SHOWN = 6
"""Pictures, or texts, that are kept as evidence."""
FLAT = 12
"""Numbers that are shown of a sample that is no image."""
CONFIDENCE = 0.999
"""Confidence of the empirical epsilon: several attacks have a try, and none may refute a claim by luck."""
OWN = 20
"""Samples of each client that are asked about, where their source is guessed."""


class Judged(NamedTuple):
    """What a probe got, and what can be had without it."""

    figures: Mapping[str, float]
    """The first is the one that counts."""
    floor: float = math.nan
    """What the first is without any attack."""
    margin: float = 0.0
    """By how much it must exceed the floor to be more than chance."""
    open_from: float = math.inf
    """From where on what the probe was after is laid open."""
    by_luck: bool = False
    """Whether the margin is what luck may give, since few are judged."""
    pictures: tuple[Picture, ...] = ()
    texts: tuple[Text, ...] = ()

    @property
    def chance(self) -> float:
        """Return what the first figure may be by chance; not a number where luck plays no part."""
        return self.floor + self.margin if self.by_luck else math.nan

    @property
    def level(self) -> str:
        """Return how much that is."""
        value = next(iter(self.figures.values()), math.nan)
        if not value > self.floor + self.margin:
            return NOTHING
        return OPEN if value >= self.open_from else SOME


class Case(NamedTuple):
    """What a judge knows of a case: guesses, and the truth that probes never see."""

    watched: Watched
    guesses: Sequence[Guess]
    truth_C: Tensor
    """For membership which candidates are members, for sources whose each is; empty for other goals."""
    delta: float = 0.0
    """The delta of the plan's privacy; 0 if it has none."""

    @property
    def truths(self) -> list[Truth]:
        """Return the truth of each row, counted over all sights."""
        return [truth for sight in self.watched.truths for truth in sight]

    def with_truth(self) -> Iterator[tuple[Guess, Samples]]:
        """Yield guesses about rows with the samples behind them."""
        for guess in self.guesses:
            if guess.row is not None:
                yield guess, samples_of(self.watched, self.truths[guess.row])


Judge = Callable[[Case], Judged | None]
"""(case) -> what was got; None if there is nothing to judge."""


def judge_samples(case: Case) -> Judged | None:
    """Compare samples: the best PSNR counts, beside the best of a blank sample, the mean and the nearest elsewhere."""
    known, best = case.watched.known, None
    span = known.high - known.low
    for guess, true in case.with_truth():
        if guess.x is None or not len(guess.x):
            continue
        found = match(guess.x, true.x[:MAX_TRUE], span)
        if best is None or max(found.psnr) > max(best[0].psnr):
            best = found, guess, true.x[:MAX_TRUE]
    if best is None:
        return None
    found, guess, x = best
    own = known.elsewhere.x
    blank = float(psnr(torch.full_like(x, (known.low + known.high) / 2), x, span).max())
    mean = float(psnr(own.mean(0).expand_as(x), x, span).max())
    nearest = max(float(psnr(own, one.expand_as(own), span).max()) for one in x)
    order = [n for n in np.argsort(found.psnr)[::-1].tolist() if found.guess[n] >= 0][:SHOWN]
    assert guess.x is not None
    return Judged(
        figures={
            "best PSNR in dB": max(found.psnr),
            "share of samples above 30 dB": found.share_sharp,
            "best SSIM": max(found.ssim),
            "best dB of a blank one": blank,
            "best dB of the mean one": mean,
            "best dB of the nearest public one": nearest,
        },
        floor=max(blank, mean, nearest),
        margin=1.0,
        open_from=SHARP,
        pictures=tuple(
            Picture(
                drawn(x[n], known.low, known.high),
                drawn(guess.x[found.guess[n]], known.low, known.high),
                found.psnr[n],
                found.ssim[n],
            )
            for n in order
        ),
    )


def drawn(sample: Tensor, low: float, high: float) -> np.ndarray:
    """Return a sample as a picture of uint8, (H, W) or (H, W, 3), if it is an image; else its first numbers."""
    if sample.dim() != 3 or min(sample.shape[1:]) < 2:
        return sample.flatten()[:FLAT].double().numpy()
    scaled = ((sample.double() - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().to(torch.uint8)
    return scaled.permute(1, 2, 0).numpy() if len(sample) == 3 else scaled[0].numpy()


def judge_labels(case: Case) -> Judged | None:
    """Compare how many samples of each class a row has: the share of labels that are right."""
    num = case.watched.known.num_classes
    usual_K = _counts(case.watched.known.elsewhere.y, num)
    rows = [
        (_overlap(guess.counts_K, own_K), _overlap(usual_K, own_K))
        for guess, true in case.with_truth()
        if guess.counts_K is not None and true.y.dim() == 1
        for own_K in [_counts(true.y, num)]
    ]
    return _share_judged("labels", rows)


def judge_tokens(case: Case) -> Judged | None:
    """Compare words: the share of a row's words that are right, and of positions where a probe says the order."""
    num, rows, orders, texts = case.watched.known.num_classes, list[tuple[float, float]](), list[float](), list[Text]()
    usual_K = _counts(case.watched.known.elsewhere.x, num)
    for guess, true in case.with_truth():
        own_K = _counts(true.x, num)
        counts_K = _counts(guess.y, num) if guess.counts_K is None and guess.y is not None else guess.counts_K
        if counts_K is None:
            continue
        rows.append((_overlap(counts_K, own_K), _overlap(usual_K, own_K)))
        if guess.y is not None and true.x.dim() == 2 and len(guess.y) == true.x.shape[1]:
            right_N = (true.x == guess.y).double().mean(1)
            place = int(right_N.argmax())
            orders.append(float(right_N[place]))
            texts.append(Text(_text(case, true.x[place]), _text(case, guess.y), orders[-1]))
        elif guess.counts_K is not None:
            texts.append(Text(_bag(case, own_K), _bag(case, counts_K), rows[-1][0]))
    judged = _share_judged("tokens", rows)
    if judged is None:
        return None
    order = {"share of positions right": max(orders)} if orders else {}
    best = sorted(texts, key=lambda text: -text.right)[:SHOWN]
    return judged._replace(figures={**judged.figures, **order}, texts=tuple(best))


def judge_membership(case: Case) -> Judged | None:
    """Compare scores of members and others: AUC, true positives at few false ones, and the empirical epsilon."""
    scored = [each.score_C for each in case.guesses if each.score_C is not None]
    verdicts = [membership_verdict(each, case.truth_C, delta=case.delta, confidence=CONFIDENCE) for each in scored]
    if not verdicts:
        return None
    best = max(verdicts, key=lambda verdict: verdict.auc)
    return Judged(
        figures={
            "AUC": best.auc,
            "members found at 0.1 % false alarms": max(each.tpr_at_0_001 for each in verdicts),
            "members found at 1 % false alarms": max(each.tpr_at_0_01 for each in verdicts),
            "empirical epsilon": max(each.epsilon for each in verdicts),
            "AUC of guessing": 0.5,
        },
        floor=0.5,
        margin=_auc_margin(int(case.truth_C.sum()), int((~case.truth_C).sum())),
        open_from=0.7,
        by_luck=True,
    )


def judge_property(case: Case) -> Judged | None:
    """Compare clients that have samples of a class with those that have none, by how likely a probe finds each."""
    rows = [(guess, true) for guess, true in case.with_truth() if guess.value is not None]
    if not rows:
        return None
    label = int(rows[0][0].notes.get("label", 0))
    has_R = torch.tensor([bool((true.y == label).any()) for _, true in rows])
    if bool(has_R.all()) or not bool(has_R.any()):
        raise DataError(f"{'all' if has_R.all() else 'none'} of the clients seen have samples of class {label}")
    value = auc(torch.tensor([guess.value for guess, _ in rows], dtype=torch.float64), has_R)
    return Judged(
        figures={f"AUC for clients with class {label}": value, "AUC of guessing": 0.5},
        floor=0.5,
        margin=_auc_margin(int(has_R.sum()), int((~has_R).sum())),
        open_from=0.8,
        by_luck=True,
    )


def judge_source(case: Case) -> Judged | None:
    """Compare the row that a probe names for each candidate with the rows that its owner is behind."""
    scored = [(guess.row, guess.score_C) for guess in case.guesses if guess.score_C is not None]
    if len(scored) < 2:
        return None
    picked_C = torch.stack([score_C for _, score_C in scored]).argmax(0).tolist()
    behind = [case.truths[row or 0].clients for row, _ in scored]
    owners = case.truth_C.tolist()
    right = float(np.mean([owner in behind[place] for owner, place in zip(owners, picked_C, strict=True)]))
    chance = float(np.mean([np.mean([owner in clients for clients in behind]) for owner in owners]))
    return Judged(
        figures={"share of samples whose source is named": right, "share by guessing": chance},
        floor=chance,
        margin=3 * math.sqrt(max(chance * (1 - chance), 1e-6) / len(owners)),
        open_from=max(0.5, min(0.9, 3 * chance)),
        by_luck=True,
    )


def owned_candidates(watched: Watched, rng: np.random.Generator) -> tuple[Samples, Tensor]:
    """Return samples of the clients behind rows, and whose each is: for the judge; probes see the samples alone."""
    clients = sorted({client for sight in watched.truths for truth in sight for client in truth.clients})
    chosen = rng.permutation(clients)[:100]
    loaded = [samples_of(watched, Truth((int(client),), 0)) for client in chosen]
    x, y = (torch.cat([part[:OWN] for part in parts]) for parts in zip(*loaded, strict=True))
    owners = [int(client) for client, each in zip(chosen, loaded, strict=True) for _ in range(min(OWN, len(each.y)))]
    return Samples(x.contiguous(), y), torch.tensor(owners)


def num_candidates(watched: Watched, most: int) -> int:
    """Return how many candidates of membership there can be, at most `most`; DataError if there are too few."""
    num = min(most, most_candidates(watched))
    if num < 20:
        raise DataError(
            f"there are samples for {num} candidates only, of which half were trained on: set evaluation.holdout, or "
            "give the data set a larger test set"
        )
    return num


def _share_judged(what: str, rows: Sequence[tuple[float, float]]) -> Judged | None:
    """Return the judgement of shares that are right: the row that gains most over the usual ones counts."""
    if not rows:
        return None
    right, usual = max(rows, key=lambda row: row[0] - row[1])
    figures = {f"share of {what} right": right, "share right by the usual ones": usual}
    return Judged(figures, floor=usual, margin=0.1, open_from=0.9)


def _auc_margin(num_in: int, num_out: int) -> float:
    """Return three standard deviations of the AUC of scores that tell nothing (Mann and Whitney 1947)."""
    return 3 * math.sqrt((num_in + num_out + 1) / (12 * max(1, num_in) * max(1, num_out)))


def _counts(values: Tensor, num: int) -> Tensor:
    return torch.bincount(values.flatten().long().clamp(min=0), minlength=num).double()


def _overlap(found_K: Tensor, own_K: Tensor) -> float:
    """Return the share of true ones that guessed counts cover, brought to the same total."""
    scaled_K = found_K.double().clamp(min=0) * own_K.sum() / found_K.double().clamp(min=0).sum().clamp(min=1e-12)
    return float(torch.minimum(scaled_K, own_K).sum() / own_K.sum())


def _words(case: Case) -> Callable[[int], str]:
    names = case.watched.job.federation.dataset.class_names
    return lambda token: names[token] if 0 <= token < len(names) else f"{token} "


def _text(case: Case, tokens: Tensor) -> str:
    return "".join(map(_words(case), tokens.flatten().tolist()))


def _bag(case: Case, counts_K: Tensor) -> str:
    """Return the words that occur, the most frequent first, with their numbers."""
    word = _words(case)
    present = [k for k in counts_K.argsort(descending=True).tolist() if counts_K[k] >= 0.5][:30]
    return ", ".join(f"{word(k).strip() or '␣'} ×{round(float(counts_K[k]))}" for k in present)
