"""Every rule against a slow one written down from its paper, in plain NumPy. Shapes: C clients, D parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from atoll.aggregators import columns
from atoll.aggregators.columns import gram_matrix
from atoll.aggregators.grouping import group_shares
from atoll.core.aggregator import Aggregator
from atoll.core.errors import PlanError
from atoll.core.messages import State, Update
from atoll.core.parts import Part

SEEDS = st.integers(0, 10**6)
PLAIN = {"name": "norm_clipping", "norm": 1e9}
"""The unweighted mean of rows."""
SIZES = st.sampled_from([1, 5, 40, 403])


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Shrink the blocks, so that few columns make several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MIN_COLUMNS", 100)
        patch.setattr(columns, "BLOCK_VALUES", 1000)
        yield


def matrix(seed: int, num: int, size: int) -> np.ndarray:
    """Rows with an outlier, two equal ones, and scales that differ by coordinate."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num, size)) * rng.uniform(0.1, 3, size=size) + rng.normal(size=size)
    rows[0] *= 30
    rows[-1] = rows[1]
    return rows.astype(np.float32).astype(np.float64)


def built(name: str, **options: Any) -> Aggregator:
    rule: Aggregator = Part(name, **options).build("aggregators", seed=7)
    return rule


def fed(rule: Aggregator, rows: np.ndarray, memory: State | None = None) -> tuple[np.ndarray, State]:
    update = Update(torch.from_numpy(rows.astype(np.float32)), torch.ones(len(rows)), {})
    found, after = rule.finish(rule.add(rule.zero(), update), rule.init() if memory is None else memory)
    return found.delta_D.double().numpy(), after


def close(found: np.ndarray, expected: np.ndarray, slack: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=slack * max(1.0, float(np.abs(expected).max())))


def slow_median(rows: np.ndarray) -> np.ndarray:
    middle = []
    for column in rows.T:
        values = sorted(column)
        half = len(values) // 2
        middle.append(values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2)
    return np.array(middle)


def slow_trimmed(rows: np.ndarray, f: int) -> np.ndarray:
    return np.array([sum(sorted(column)[f : len(column) - f]) / (len(column) - 2 * f) for column in rows.T])


def square(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).sum())


def slow_krum_order(rows: np.ndarray, f: int) -> list[int]:
    num = len(rows)

    def score(i: int) -> tuple[float, float]:
        others = sorted(square(rows[i], rows[j]) for j in range(num) if j != i)
        return round(sum(others[: max(1, num - f - 2)]), 9), sum(others)

    return sorted(range(num), key=score)


def slow_nnm(rows: np.ndarray, f: int) -> np.ndarray:
    mixed = []
    for row in rows:
        nearest = sorted(range(len(rows)), key=lambda j: square(row, rows[j]))[: len(rows) - f]
        mixed.append(rows[nearest].mean(0))
    return np.array(mixed)


def slow_bulyan(rows: np.ndarray, f: int) -> np.ndarray:
    left, picked = list(rows), []
    for _ in range(len(rows) - 2 * f):
        picked.append(left.pop(slow_krum_order(np.array(left), f)[0]))
    found = []
    for column in np.array(picked).T:
        middle = slow_median(column[:, None])[0]
        found.append(np.mean(sorted(column, key=lambda value: abs(value - middle))[: len(picked) - 2 * f]))
    return np.array(found)


def slow_weiszfeld(rows: np.ndarray, nu: float, iterations: int) -> np.ndarray:
    distances = [[square(a, b) ** 0.5 for b in rows] for a in rows]
    least = min(sum(each) for each in distances)
    starts = []
    for each in distances:
        if sum(each) <= least * (1 + 1e-9):
            majority = sorted(range(len(rows)), key=lambda i: each[i])[: len(rows) // 2 + 1]
            starts.append(rows[majority].mean(0))
    z = np.mean(starts, axis=0)
    for _ in range(iterations):
        beta = np.array([1 / max(nu, square(row, z) ** 0.5) for row in rows])
        z = (beta[:, None] * rows).sum(0) / beta.sum()
    return z


def slow_clipping(rows: np.ndarray, v: np.ndarray, tau: float, iterations: int) -> np.ndarray:
    for _ in range(iterations):
        v = v + np.mean([(row - v) * min(1.0, tau / max(square(row, v) ** 0.5, 1e-300)) for row in rows], axis=0)
    return v


def slow_caf(rows: np.ndarray, f: int) -> np.ndarray:
    c, best, least = np.ones(len(rows)), rows.mean(0), np.inf
    while c.sum() > len(rows) - 2 * f:
        mean = (c[:, None] * rows).sum(0) / c.sum()
        away = rows - mean
        values, vectors = np.linalg.eigh((c[:, None] * away).T @ away / c.sum())
        if values[-1] < least:
            best, least = mean, values[-1]
        tau = (away @ vectors[:, -1]) ** 2
        c = c * (1 - tau / tau[c > 0].max())
        c[c < 1e-9] = 0
    return best


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(1, 13), size=SIZES)
def test_median(seed: int, num: int, size: int) -> None:
    rows = matrix(seed, num + 1, size)
    close(fed(built("median"), rows)[0], slow_median(rows))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 4), more=st.integers(0, 4), size=SIZES)
def test_trimmed_mean(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 2 * f + 2 + more, size)
    close(fed(built("trimmed_mean", f=f), rows)[0], slow_trimmed(rows, f))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 3), more=st.integers(1, 4), size=SIZES)
def test_krum_and_multi_krum(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 2 * f + 3 + more, size)
    order = slow_krum_order(rows, f)
    close(fed(built("krum", f=f), rows)[0], rows[order[0]])
    for num_selected in (2, len(rows) - f - 2):
        options = {"num_selected": 2} if num_selected == 2 else {}
        close(fed(built("multi_krum", f=f, **options), rows)[0], rows[order[:num_selected]].mean(0))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 2), more=st.integers(0, 4), size=SIZES)
def test_bulyan(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 4 * f + 3 + more, size)
    close(fed(built("bulyan", f=f), rows)[0], slow_bulyan(rows, f))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(2, 13), size=SIZES, iterations=st.sampled_from([1, 3, 100]))
def test_geometric_median(seed: int, num: int, size: int, iterations: int) -> None:
    assume(size > 1 or num % 2)  # on a line, every point between the middle two of an even number is a median
    rows = matrix(seed, num, size)
    nu = 0.05
    found, _ = fed(built("geometric_median", nu=nu, iterations=iterations), rows)
    close(found, slow_weiszfeld(rows, nu, iterations), 1e-4)


def test_the_geometric_median_is_the_least_sum_of_distances() -> None:
    rows = matrix(2, 11, 6)
    found, _ = fed(built("geometric_median"), rows)

    def total(z: np.ndarray) -> float:
        return sum(square(row, z) ** 0.5 for row in rows)

    rng = np.random.default_rng(0)
    best = total(found)
    assert all(best <= total(found + step) + 1e-5 for step in rng.normal(size=(200, 6)) * 0.05)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(2, 9), size=SIZES, tau=st.floats(0.1, 50), iterations=st.integers(1, 3))
def test_centered_clipping_remembers_the_last_aggregate(
    seed: int, num: int, size: int, tau: float, iterations: int
) -> None:
    rule, v, memory = built("centered_clipping", tau=tau, iterations=iterations), np.zeros(size), None
    for number in range(3):
        rows = matrix(seed + number, num, size)
        found, memory = fed(rule, rows, memory)
        v = slow_clipping(rows, v, tau, iterations)
        close(found, v)
    assert memory is not None
    assert torch.equal(memory["delta"].double(), torch.from_numpy(found))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(2, 9), size=SIZES)
def test_norm_clipping(seed: int, num: int, size: int) -> None:
    rows = matrix(seed, num, size)
    norms = [square(row, 0 * row) ** 0.5 for row in rows]
    for norm in (1.5, None):
        bound = sorted(norms)[(num - 1) // 2] if norm is None else norm
        expected = np.mean([row * min(1.0, bound / n) for row, n in zip(rows, norms, strict=True)], axis=0)
        close(fed(built("norm_clipping", **({} if norm is None else {"norm": norm})), rows)[0], expected)
    assert not fed(built("norm_clipping"), np.zeros((4, 3)))[0].any()


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 3), more=st.integers(1, 3), size=SIZES)
def test_minimum_diameter(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 2 * f + 1 + more, size)
    found, _ = fed(built("minimum_diameter", f=f), rows)

    def diameter(some: tuple[int, ...]) -> float:
        return max((square(rows[i], rows[j]) for i, j in combinations(some, 2)), default=0.0)

    subsets = list(combinations(range(len(rows)), len(rows) - f))
    least = min(diameter(some) for some in subsets)
    tightest = [rows[list(some)].mean(0) for some in subsets if diameter(some) <= least * (1 + 1e-9)]
    assert min(float(np.abs(found - mean).max()) for mean in tightest) < 1e-4 * max(1.0, float(np.abs(found).max()))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 3), more=st.integers(1, 5), size=st.sampled_from([1, 5, 40]))
def test_caf(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 2 * f + 1 + more, size)
    close(fed(built("caf", f=f), rows)[0], slow_caf(rows, f), 1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.integers(0, 3), more=st.integers(1, 3), size=SIZES)
def test_nnm_wraps_any_rule(seed: int, f: int, more: int, size: int) -> None:
    rows = matrix(seed, 2 * f + 1 + more, size)
    mixed = slow_nnm(rows, f)
    close(fed(built("nnm", f=f, rule={"name": "trimmed_mean", "f": f}), rows)[0], slow_trimmed(mixed, f))
    close(fed(built("nnm", f=f, rule="mean"), rows)[0], mixed.mean(0))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(3, 13), bucket=st.integers(1, 4))
def test_bucketing_and_median_of_means_average_new_groups_in_each_round(seed: int, num: int, bucket: int) -> None:
    rows = matrix(seed, num, 6)
    rule, memory = built("bucketing", rule="median", size=bucket), None
    for number in range(2):
        found, memory = fed(rule, rows, memory)
        close(found, slow_median(group_shares(num, -(-num // bucket), 7, number).numpy() @ rows))
    close(fed(built("median_of_means", f=1), rows)[0], slow_median(group_shares(num, 3, 7, 0).numpy() @ rows))


@pytest.mark.parametrize("case", ["plain", "equal rows", "far from 0", "huge", "one huge"])
def test_products_of_large_matrices_are_as_good_as_in_float64(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(12, 5000, generator=torch.Generator().manual_seed(2))
    rows[3] = rows[4] if case == "equal rows" else rows[3]
    rows += 50 if case == "far from 0" else 0
    rows[5:] *= 1e37 if case == "huge" else 1
    rows[5] *= 1e30 if case == "one huge" else 1
    monkeypatch.setattr(columns, "LARGE_MATRIX", 1)
    found, expected = gram_matrix(rows), rows.double() @ rows.double().T

    def apart(product_CC: torch.Tensor) -> torch.Tensor:
        square_C = product_CC.diagonal()
        return square_C[:, None] + square_C[None] - 2 * product_CC

    scale = expected.diagonal().sqrt()[:, None] * expected.diagonal().sqrt()[None]
    assert float(((found - expected) / scale).abs().max()) < (1e-6 if case == "plain" else 1e-12)
    torch.testing.assert_close(apart(found)[:3, :3], apart(expected)[:3, :3], rtol=1e-5, atol=1e-6)


def test_groups_hold_each_client_once_and_change_with_the_round() -> None:
    first, second = group_shares(10, 4, 1, 0), group_shares(10, 4, 1, 1)
    assert [(int((row > 0).sum()), float(row.sum())) for row in first] == [(3, 1), (3, 1), (2, 1), (2, 1)]
    assert bool(((first > 0).sum(0) == 1).all())
    assert not torch.equal(first, second)
    assert torch.equal(first, group_shares(10, 4, 1, 0))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(1, 9), size=SIZES)
def test_fltrust(seed: int, num: int, size: int) -> None:
    rows = matrix(seed, num + 1, size)
    own, rows = rows[0], rows[1:]
    rule = built("fltrust")
    update = Update(torch.from_numpy(rows.astype(np.float32)), torch.ones(num), {})
    own_update = Update(torch.from_numpy(own.astype(np.float32)), torch.tensor(1.0), {})
    assert rule.add_server_update is not None
    found = rule.finish(rule.add_server_update(rule.add({}, update), own_update), {})[0].delta_D.double().numpy()
    norm = np.linalg.norm
    trust = [max(0.0, float(row @ own) / (norm(row) * norm(own))) for row in rows]
    stretched = [t * row * norm(own) / norm(row) for t, row in zip(trust, rows, strict=True)]
    close(found, np.sum(stretched, axis=0) / sum(trust) if sum(trust) > 0 else 0 * own)
    assert float(norm(found)) <= norm(own) * (1 + 1e-5)
    with pytest.raises(PlanError, match=r"set server\.samples"):
        rule.finish(rule.add({}, update), {})


def slow_clusters(rows: np.ndarray, reach: float) -> np.ndarray:
    distances = {(i, j): float(np.linalg.norm(rows[i] - rows[j])) for i, j in combinations(range(len(rows)), 2)}
    near = reach * sorted(distances.values())[len(distances) // 4]
    clusters = [{i} for i in range(len(rows))]
    for (i, j), distance in distances.items():
        if distance <= near:
            one, other = (next(cluster for cluster in clusters if k in cluster) for k in (i, j))
            if one is not other:
                clusters.remove(other)
                one |= other
    return np.array([rows[sorted(cluster)].mean(0) for cluster in clusters])


@settings(max_examples=40, deadline=None)
@example(seed=79, num=7, size=403, reach=0.0)  # copies whose products are rounded in different ways
@given(seed=SEEDS, num=st.integers(4, 12), size=SIZES, reach=st.sampled_from([0.0, 0.3, 0.9]))
def test_sybils(seed: int, num: int, size: int, reach: float) -> None:
    rows = matrix(seed, num, size)
    close(fed(built("sybils", rule=PLAIN, reach=reach), rows)[0], slow_clusters(rows, reach).mean(0))


def test_colluders_that_send_the_same_or_copy_a_client_count_once() -> None:
    honest = np.random.default_rng(5).normal(size=(9, 30))
    rule = built("sybils", rule=PLAIN)
    same = np.concatenate([honest, np.tile(honest.mean(0) - 3, (6, 1))])
    close(fed(rule, same)[0], (honest.sum(0) + honest.mean(0) - 3) / 10)
    copies = np.concatenate([honest, np.tile(honest[4], (8, 1))])
    close(fed(rule, copies)[0], honest.mean(0))


def test_a_wrapped_rule_keeps_its_memory() -> None:
    inner, rows = {"name": "centered_clipping", "tau": 0.5}, matrix(1, 9, 4)
    rule, memory, v = built("nnm", f=1, rule=inner), None, np.zeros(4)
    for _ in range(3):
        found, memory = fed(rule, rows, memory)
        v = slow_clipping(slow_nnm(rows, 1), v, 0.5, 1)
        close(found, v)
    assert memory is not None
    assert sorted(memory) == ["round", "rule.delta"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("krum", {"f": -1}, "krum: f must be 0 or more, got -1; f is the largest number of bad clients"),
        ("trimmed_mean", {"f": 1.5}, "trimmed_mean: f must be"),
        ("multi_krum", {"f": 1, "num_selected": 0}, "num_selected must be at least 1"),
        ("minimum_diameter", {"f": 13}, "f must be in .0, 12., got 13; it tries up to 2.f sets; for more use nnm"),
        ("median_of_means", {"f": 2, "num_groups": 4}, "at least 5"),
        ("centered_clipping", {"tau": 0.0}, "tau must be above 0"),
        ("geometric_median", {"nu": 0.0}, "nu must be above 0"),
        ("norm_clipping", {"norm": 0.0}, "above 0"),
        ("bucketing", {"rule": "median", "size": 0}, "at least 1"),
        ("nnm", {"f": 1, "rule": "fltrust"}, "cannot be wrapped"),
        ("sybils", {"rule": "median", "reach": 1.0}, r"reach must be in \[0, 1\), got 1.0"),
        ("sybils", {"rule": "mean"}, "a single cluster, but mean does not look at single updates"),
        ("sybils", {"rule": {"name": "krum", "f": 2}}, "leave a single cluster, but krum with f = 2 needs at least"),
        ("nnm", {"f": 1, "rule": "krumm"}, "did you mean 'krum'"),
        ("krum", {}, "krum: f is missing: give it a value"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        built(name, **options)


def test_what_a_wrapper_needs_follows_from_what_it_wraps() -> None:
    krum = {"name": "krum", "f": 2}
    assert built("nnm", f=1, rule=krum).min_updates == 7
    assert built("nnm", f=4, rule=krum).min_updates == 9
    assert built("bucketing", size=3, rule=krum).min_updates == 19  # 7 buckets, the last of one
    assert built("bucketing", rule={"name": "nnm", "f": 3, "rule": "median"}).min_updates == 13
    assert built("nnm", f=1, rule="majority").unit_steps
