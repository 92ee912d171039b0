"""What every skew must satisfy, and what each kind must show. Shapes: C clients, K classes, S samples of a client."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import every
from scipy import ndimage

from atoll.core.errors import DataError, PlanError
from atoll.core.parts import Part, find
from atoll.data.catalog.digits import digits
from atoll.data.dataset import Dataset
from atoll.data.heterogeneity import label_counts
from atoll.data.index import Partition
from atoll.data.partition.dirichlet import dirichlet
from atoll.data.partition.iid import iid
from atoll.data.partition.natural import natural
from atoll.data.partition.shards import shards
from atoll.data.skew.at_most import at_most
from atoll.data.skew.brightness import brightness
from atoll.data.skew.features import resampled
from atoll.data.skew.label_swap import label_swap
from atoll.data.skew.noise import noise
from atoll.data.skew.quantity import quantity
from atoll.data.skew.rotation import rotation
from atoll.data.skew.styles import styles
from atoll.report.figures import save_png
from atoll.report.sample_picture import sample_picture

Skew = Callable[..., Partition]

SKEWS = [find("data.skew", name) for name in every("data.skew")]
DIGITS = digits()
KINDS = {
    "at_most": "who",
    "label_swap": "y",
    "quantity": "who",
    "rotation": "x",
    "noise": "x",
    "brightness": "x",
    "styles": "x",
}
"""What each skew of the package changes."""
NUM_CLIENTS = 12

every_skew = pytest.mark.parametrize("skew", SKEWS, ids=lambda skew: skew.__name__)
seeds = st.integers(0, 2**63)


def floats(dataset: Dataset) -> Dataset:
    return replace(dataset, train_x=dataset.train_x / 16, test_x=dataset.test_x / 16, scale=1.0)


def colours(dataset: Dataset) -> Dataset:
    return replace(dataset, train_x=np.repeat(dataset.train_x, 3, axis=1), test_x=np.repeat(dataset.test_x, 3, axis=1))


def same_picture(picture: Any, num_samples: int = 120) -> Dataset:
    """Repeat one image, so that every difference between samples is made by a skew."""
    x = np.tile(np.asarray(picture, dtype=np.float32), (num_samples, 1, 1, 1))
    y = np.arange(num_samples) % 4
    return Dataset(name="same", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=4)


def held(dataset: Dataset, skew: Skew, **options: Any) -> tuple[Partition, Dataset]:
    partition = skew(dataset, iid(dataset, num_clients=NUM_CLIENTS, seed=1), **options)
    return partition, partition.dataset or dataset


def what_changed(dataset: Dataset, partition: Partition) -> set[str]:
    now, before = partition.dataset or dataset, iid(dataset, num_clients=NUM_CLIENTS, seed=1)
    changes = {"x": (now.train_x != dataset.train_x).any(), "y": (now.train_y != dataset.train_y).any()}
    changes["who"] = partition.sizes().tolist() != before.sizes().tolist()
    return {key for key, is_so in changes.items() if is_so}


def print_of(dataset: Dataset, partition: Partition) -> tuple[bytes, ...]:
    now = partition.dataset or dataset
    indices = [partition.indices(client).tobytes() for client in range(partition.num_clients)]
    return (now.train_x.tobytes(), now.train_y.tobytes(), *indices)


def test_the_folder_was_listed() -> None:
    names = {skew.__name__ for skew in SKEWS}
    assert names >= {"quantity", "rotation", "noise", "brightness", "styles", "label_swap"}
    assert "features" not in names


@every_skew
@settings(deadline=None, max_examples=5)
@given(seed=seeds)
def test_the_seed_decides_and_nothing_else(skew: Skew, seed: int) -> None:
    first = print_of(DIGITS, held(DIGITS, skew, seed=seed)[0])
    assert print_of(DIGITS, held(DIGITS, skew, seed=seed)[0]) == first
    others = [print_of(DIGITS, held(DIGITS, skew, seed=seed + step)[0]) for step in (1, 2, 3)]
    assert any(other != first for other in others)


@every_skew
@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_clients_stay_and_hold_nothing_new(skew: Skew, seed: int) -> None:
    dealt = dirichlet(DIGITS, num_clients=NUM_CLIENTS, seed=2, alpha=0.3)
    partition = skew(DIGITS, dealt, seed=seed)
    assert partition.num_clients == NUM_CLIENTS
    for client in range(NUM_CLIENTS):
        mine = partition.indices(client)
        assert len(mine) == len(set(mine.tolist())) == partition.size(client) > 0
        assert set(mine.tolist()) <= set(dealt.indices(client).tolist())


@every_skew
@pytest.mark.parametrize("variant", [lambda data: data, floats, colours], ids=["bytes", "floats", "colours"])
def test_shapes_types_and_the_test_set_are_kept(skew: Skew, variant: Callable[[Dataset], Dataset]) -> None:
    data = variant(DIGITS)
    before_x, before_y = data.train_x.copy(), data.train_y.copy()
    _, now = held(data, skew, seed=3)
    assert now.train_x.shape == data.train_x.shape and now.train_x.dtype == data.train_x.dtype
    assert now.train_y.shape == data.train_y.shape and now.train_y.dtype == data.train_y.dtype
    assert now.train_y.min() >= 0 and now.train_y.max() < data.num_classes
    assert now.test_x is data.test_x and now.test_y is data.test_y
    assert (data.train_x == before_x).all() and (data.train_y == before_y).all()
    if data.train_x.dtype == np.uint8:
        assert now.train_x.max() <= data.train_x.max()


@every_skew
def test_a_skew_changes_one_thing(skew: Skew) -> None:
    assert what_changed(DIGITS, held(DIGITS, skew, seed=0)[0]) in ({"x"}, {"y"}, {"who"})


@every_skew
def test_samples_without_a_client_are_not_changed(skew: Skew) -> None:
    owners = np.arange(DIGITS.num_train) % 5
    data = replace(DIGITS, owners=owners)
    partition = skew(data, natural(data, num_clients=4, seed=0), seed=0)
    unowned = np.setdiff1d(np.arange(data.num_train), np.concatenate([partition.indices(c) for c in range(4)]))
    now = partition.dataset or data
    assert len(unowned) > 200
    assert (now.train_x[unowned] == data.train_x[unowned]).all() and (
        now.train_y[unowned] == data.train_y[unowned]
    ).all()


@every_skew
def test_clients_that_overlap_are_refused(skew: Skew) -> None:
    with pytest.raises(PlanError, match="leave samples_per_client out"):
        skew(DIGITS, iid(DIGITS, num_clients=10**6, seed=0, samples_per_client=20), seed=0)


@every_skew
def test_tokens_and_plain_features_are_left_alone_or_refused_with_a_way_out(skew: Skew, toy: Dataset) -> None:
    tokens = np.arange(120, dtype=np.uint8).reshape(40, 3) % 9
    lines = Dataset(
        name="lines", train_x=tokens, train_y=tokens, test_x=tokens, test_y=tokens, num_classes=9, tokens=True
    )
    try:
        assert (held(lines, skew, seed=0)[1].train_x == tokens).all()
    except PlanError as error:
        assert re.search(r"those of lines are tokens; use .* label_swap or quantity", str(error))
    try:
        assert what_changed(toy, held(toy, skew, seed=0)[0])
    except PlanError as error:
        assert re.search(r"toy has shape \(3,\); reshape the data, or use noise or brightness", str(error))


def test_features_are_skewed_where_they_can_be(toy: Dataset) -> None:
    changed = {name: what_changed(DIGITS, held(DIGITS, find("data.skew", name), seed=0)[0]) for name in KINDS}
    assert changed == {name: {kind} for name, kind in KINDS.items()}
    for skew in (rotation, styles):
        with pytest.raises(PlanError, match="reshape the data"):
            held(toy, skew, seed=0)
    assert what_changed(toy, held(toy, noise, seed=0)[0])


@pytest.mark.parametrize("shape", [(9, 9), (8, 11), (1, 6)])
@pytest.mark.parametrize("angle", [0.0, 20.0, -75.0, 180.0])
def test_resampling_agrees_with_scipy(shape: tuple[int, int], angle: float) -> None:
    x = np.random.default_rng(0).random((3, 2, *shape), dtype=np.float32)
    cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    expected = ndimage.rotate(x, angle, axes=(2, 3), reshape=False, order=1, mode="nearest")
    assert resampled(x, np.array([[cos, sin], [-sin, cos]])) == pytest.approx(expected, abs=1e-5)


def tilt(picture: Any) -> float:
    """The angle of a bar, in degrees, from its second moments."""
    row, column = np.indices(picture.shape) - (np.array(picture.shape).reshape(2, 1, 1) - 1) / 2
    row_row, column_column, both = ((picture * m).sum() for m in (row * row, column * column, row * column))
    return float(np.rad2deg(np.arctan2(2 * both, column_column - row_row) / 2))


def test_rotation_turns_each_client_by_its_own_angle() -> None:
    bar = np.zeros((31, 31))
    bar[14:17, 5:26] = 1.0
    partition, now = held(same_picture(bar), rotation, seed=0, degrees=40)
    angles = []
    for client in range(NUM_CLIENTS):
        mine = now.train_x[partition.indices(client), 0]
        assert (mine == mine[0]).all()
        angles.append(tilt(mine[0]))
    assert len({round(angle, 2) for angle in angles}) == NUM_CLIENTS
    assert np.abs(angles).max() < 41 and min(angles) < -10 and max(angles) > 10


def test_noise_rises_from_client_to_client() -> None:
    partition, now = held(same_picture(np.zeros((40, 40))), noise, seed=0, sigma=0.6)
    levels = [now.train_x[partition.indices(client)].std() for client in range(NUM_CLIENTS)]
    assert levels == pytest.approx(0.6 * np.arange(1, 13) / 12, rel=0.03)


def test_noise_is_in_the_units_that_a_model_sees() -> None:
    grey = replace(same_picture(np.zeros((40, 40))), scale=0.01)
    partition, now = held(grey, noise, seed=0, sigma=0.6)
    assert now.train_x[partition.indices(11)].std() * now.scale == pytest.approx(0.6, rel=0.03)


def test_brightness_is_a_line_of_its_own_for_each_client() -> None:
    data = floats(DIGITS)
    partition, now = held(data, brightness, seed=0, gain=0.5, offset=0.2)
    lines = []
    for client in range(NUM_CLIENTS):
        mine = partition.indices(client)
        old, new = data.train_x[mine].ravel(), now.train_x[mine].ravel()
        gain, offset = np.polyfit(old, new, 1)
        assert new == pytest.approx(gain * old + offset, abs=1e-4)
        lines.append((gain, offset))
    gains, offsets = np.array(lines).T
    assert gains.min() > 0.5 and gains.max() < 1.5 and np.ptp(gains) > 0.3
    assert np.abs(offsets).max() < 0.2 and np.ptp(offsets) > 0.1


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_each_group_has_a_style_of_its_own(num_groups: int) -> None:
    bar = np.zeros((31, 31))
    bar[8:23, 14:17] = 16.0
    partition, now = held(same_picture(bar), styles, seed=0, num_groups=num_groups)
    looks = []
    for client in range(NUM_CLIENTS):
        mine = now.train_x[partition.indices(client), 0]
        assert (mine == mine[0]).all()
        looks.append(mine[0].tobytes())
    sizes = [looks.count(look) for look in set(looks)]
    assert len(sizes) == num_groups and max(sizes) - min(sizes) <= 1
    drawn = [np.frombuffer(look, np.float32).reshape(31, 31) for look in set(looks)]
    assert sorted(look[0, 0] for look in drawn) == [0] * (num_groups - num_groups // 2) + [16] * (num_groups // 2)
    strokes = [np.abs(look - look[0, 0]) for look in drawn]
    assert max(stroke.sum() for stroke in strokes) > 1.5 * min(stroke.sum() for stroke in strokes)
    row, column = np.indices((31, 31)) - 15
    slants = sorted((stroke * row * column).sum() / (stroke * row * row).sum() for stroke in strokes)
    assert slants == pytest.approx(np.linspace(-0.5, 0.5, num_groups), abs=0.05)


def test_styles_leave_digits_legible() -> None:
    """A nearest neighbour of the same style finds the label, so that P(y|x) is still there to be learned."""
    partition, now = held(DIGITS, styles, seed=0, num_groups=4)
    looks = np.array([now.train_x[partition.indices(client)].mean(axis=(0, 1)).ravel() for client in range(12)])
    alike = np.linalg.norm(looks[:, None] - looks[None], axis=2)
    right = []
    for client in range(12):
        friends = np.argsort(alike[client])[1:3]
        known = np.concatenate([partition.indices(friend) for friend in friends])
        mine = partition.indices(client)
        x, pool = (now.train_x[part].reshape(len(part), -1).astype(float) for part in (mine, known))
        nearest = ((x[:, None] - pool[None]) ** 2).sum(axis=2).argmin(axis=1)
        right.append((now.train_y[known][nearest] == now.train_y[mine]).mean())
    assert min(right) > 0.7


def renamings(dataset: Dataset, **options: int) -> list[tuple[int, ...]]:
    """What each client calls the labels, where every client has samples of all."""
    partition, now = held(dataset, label_swap, seed=0, **options)
    found = []
    for client in range(NUM_CLIENTS):
        mine = partition.indices(client)
        pairs = sorted(set(zip(dataset.train_y[mine].tolist(), now.train_y[mine].tolist(), strict=True)))
        assert [old for old, _ in pairs] == list(range(dataset.num_classes)) == sorted(new for _, new in pairs)
        found.append(tuple(new for _, new in pairs))
    return found


@pytest.mark.parametrize(("num_groups", "num_swapped"), [(2, 2), (5, 3), (3, 10)])
def test_each_group_swaps_labels_its_own_way(num_groups: int, num_swapped: int) -> None:
    found = renamings(DIGITS, num_groups=num_groups, num_classes_swapped=num_swapped)
    assert all(sum(old != new for old, new in enumerate(renaming)) == num_swapped for renaming in found)
    sizes = [found.count(renaming) for renaming in set(found)]
    assert len(sizes) == num_groups and max(sizes) - min(sizes) <= 1


def test_quantity_follows_the_power_law() -> None:
    partition, _ = held(DIGITS, quantity, seed=0, law="power", exponent=1.0)
    largest = DIGITS.num_train / NUM_CLIENTS
    assert sorted(partition.sizes(), reverse=True) == pytest.approx(largest / np.arange(1, 13), abs=1.1)


@pytest.mark.parametrize("options", [{"law": "log_normal", "sigma": 2.0}, {"law": "dirichlet", "alpha": 0.2}])
def test_quantity_has_other_laws(options: dict[str, Any]) -> None:
    sizes = held(DIGITS, quantity, seed=0, **options)[0].sizes()
    assert sizes.max() >= DIGITS.num_train // NUM_CLIENTS and sizes.max() > 5 * sizes.min()


def test_quantity_keeps_the_mix_of_labels_in_expectation() -> None:
    dealt = dirichlet(DIGITS, num_clients=NUM_CLIENTS, seed=0, alpha=1.0, min_samples=80)

    def mix(partition: Partition) -> Any:
        counts_CK = label_counts(partition, DIGITS.train_y, 10, range(NUM_CLIENTS))
        return counts_CK / counts_CK.sum(axis=1, keepdims=True)

    mean = np.mean([mix(quantity(DIGITS, dealt, seed=seed, exponent=0.5)) for seed in range(200)], axis=0)
    assert np.abs(mean - mix(dealt)).max() < 0.02
    assert np.abs(mix(quantity(DIGITS, dealt, seed=0, exponent=0.5)) - mix(dealt)).max() > 0.02


def test_at_most_draws_that_many_and_keeps_small_clients_whole() -> None:
    dealt = quantity(DIGITS, iid(DIGITS, num_clients=NUM_CLIENTS, seed=1), seed=0, exponent=1.0)
    bound = int(np.median(dealt.sizes()))
    kept = at_most(DIGITS, dealt, seed=0, samples=bound)
    assert kept.sizes().tolist() == np.minimum(dealt.sizes(), bound).tolist()
    largest = int(dealt.sizes().argmax())
    assert kept.indices(largest).tolist() != dealt.indices(largest)[:bound].tolist()


def test_quantity_leaves_no_client_empty() -> None:
    assert held(DIGITS, quantity, seed=0, exponent=80.0)[0].sizes().min() == 1


def test_quantity_keeps_what_an_earlier_skew_changed() -> None:
    turned = rotation(DIGITS, iid(DIGITS, num_clients=4, seed=0), seed=0)
    assert turned.dataset is not None
    assert quantity(turned.dataset, turned, seed=0).dataset is turned.dataset


@pytest.mark.parametrize(
    ("skew", "options", "message"),
    [
        (rotation, {"degrees": 0}, "degrees must be in .0, 180., got 0"),
        (rotation, {"degrees": 181}, "degrees must be in .0, 180., got 181"),
        (noise, {"sigma": -1.0}, "noise: sigma must be in .0, 1000., got -1"),
        (noise, {"sigma": float("nan")}, "sigma must be a finite number in .0, 1000., got nan"),
        (brightness, {"gain": 1.5}, "gain must be in .0, 1., got 1.5"),
        (brightness, {"offset": "much"}, "offset must be a number in .0, 1000., got the text 'much'"),
        (styles, {"num_groups": 1}, "num_groups must be at least 2, got 1"),
        (styles, {"num_groups": 13}, "12 clients cannot form 13 groups: lower num_groups"),
        (label_swap, {"num_classes_swapped": 1}, "num_classes_swapped must be at least 2, got 1"),
        (label_swap, {"num_classes_swapped": 11}, "digits has 10 classes: lower it"),
        (
            quantity,
            {"law": "powr"},
            "law must be 'power', 'log_normal' or 'dirichlet', got the text 'powr': did you mean 'power'",
        ),
        (quantity, {"law": "power", "alpha": 0.1}, "law = 'power' has no alpha, got 0.1: set exponent"),
        (at_most, {"samples": 0}, "samples must be at least 1, got 0"),
        (quantity, {"exponent": float("inf")}, "exponent must be a finite number above 0, got inf"),
    ],
)
def test_bad_options_are_refused(skew: Skew, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Part(skew, **options).build("data.skew", DIGITS, iid(DIGITS, num_clients=12, seed=0), seed=0)


def test_groups_use_every_renaming_there_is_and_no_more() -> None:
    data = same_picture(np.eye(4), num_samples=1200)
    assert len(set(renamings(data, num_groups=6))) == 6
    with pytest.raises(PlanError, match=r"fewer than 7 ways to exchange 2 of the 4 labels .* lower num_groups"):
        held(data, label_swap, seed=0, num_groups=7)


def test_the_picture_shows_eight_labelled_samples_of_each_client(tmp_path: Any) -> None:
    few = shards(DIGITS, num_clients=300, seed=0)
    figure = sample_picture(DIGITS, few, [0, 5, 299], "digits, $300 clients$")
    assert len(figure.axes) == 24
    first = few.indices(5)[0]
    panel = figure.axes[8]
    assert panel.get_title() == DIGITS.class_names[DIGITS.train_y[first]]
    drawn = panel.images[0].get_array()
    assert drawn is not None and np.asarray(drawn) == pytest.approx(DIGITS.train_x[first, 0] / 16)
    shown = sum(bool(axes.images) for axes in figure.axes[:8])
    assert shown == min(8, few.size(0)) < 8
    assert save_png(figure, tmp_path / "samples.png", dpi=40).stat().st_size > 1000
    colour = sample_picture(colours(DIGITS), few, [1], "colours").axes[0].images[0].get_array()
    assert colour is not None and colour.shape == (8, 8, 3)


def test_only_pictures_are_drawn(toy: Dataset) -> None:
    with pytest.raises(DataError, match=r"toy cannot be drawn: they have shape \(3,\)"):
        sample_picture(toy, iid(toy, num_clients=2, seed=0), [0], "toy")
