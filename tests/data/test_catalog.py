"""The catalogue: real data, loaded as a user loads them, and checked against facts known about them."""

from __future__ import annotations

import importlib
import io
import pkgutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import atoll.data.catalog
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.data.catalog import cifar10
from atoll.data.catalog.digits import digits
from atoll.data.catalog.shakespeare import VOCABULARY, roles, shakespeare
from atoll.data.catalog.synthetic import synthetic
from atoll.data.dataset import Array, Dataset
from atoll.data.fetch import sha256_of
from atoll.data.idx import read_idx
from atoll.data.partition.natural import WITH_OWNERS, natural

NAMES = [module.name for module in pkgutil.iter_modules(atoll.data.catalog.__path__)]
Load = Callable[[str], Dataset]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_follows_the_convention(name: str) -> None:
    module = importlib.import_module(f"atoll.data.catalog.{name}")
    assert callable(getattr(module, name)) and getattr(module, name).__doc__
    assert module.SUMMARY and "\n" not in module.SUMMARY
    assert module.SIZE == "none" or module.SIZE.endswith("MB")


def test_the_catalogue_opens_without_heavy_imports() -> None:
    program = f"import sys; {'; '.join(f'import atoll.data.catalog.{name}' for name in NAMES)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "httpx2", "PIL", "rich", "sklearn"} & set(loaded)


def test_digits_are_those_of_scikit_learn() -> None:
    known = pytest.importorskip("sklearn.datasets").load_digits()
    data = digits()
    assert data.train_x.shape == (1437, 1, 8, 8) and data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.dtype == np.uint8 and data.scale == 1 / 16
    ours = np.concatenate([data.train_x, data.test_x]).reshape(1797, 64)
    labels = np.concatenate([data.train_y, data.test_y])
    rows = sorted(map(tuple, np.column_stack([ours, labels])))
    assert rows == sorted(map(tuple, np.column_stack([known.data, known.target]).astype(int)))


def test_digits_are_split_evenly_and_always_alike() -> None:
    data = digits()
    assert np.bincount(data.test_y).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
    assert (digits().train_x == data.train_x).all()
    assert data.test_y[:12].tolist() == [8, 6, 9, 9, 1, 1, 0, 1, 2, 7, 6, 6]


def test_synthetic_has_the_shapes_and_sizes_of_the_paper() -> None:
    data = synthetic(num_devices=400, num_features=8, num_classes=5)
    assert data.owners is not None and data.input_shape == (8,) and data.num_classes == 5
    sizes = np.bincount(data.owners)
    assert len(sizes) == 400 and sizes.min() >= 45
    # The median of exp(N(4, 2)) + 50 is e^4 + 50; nine tenths of it are for training.
    assert np.median(sizes) == pytest.approx(0.9 * (np.e**4 + 50), rel=0.15)
    assert data.num_train / (data.num_train + data.num_test) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_beta_moves_the_inputs_of_devices_apart(beta: float) -> None:
    data = synthetic(beta=beta, num_devices=300, num_features=20)
    assert data.owners is not None
    centres = [data.train_x[data.owners == k].mean() for k in range(300)]
    assert np.std(centres) == pytest.approx(np.sqrt(beta**2 + 1 / 20), rel=0.15)


def test_features_have_the_variances_of_the_paper() -> None:
    data = synthetic(num_devices=20)
    assert data.owners is not None
    biggest = data.train_x[data.owners == np.bincount(data.owners).argmax()]
    assert len(biggest) > 500
    assert biggest.var(axis=0) == pytest.approx(np.arange(1, 61) ** -1.2, rel=0.3)


def test_labels_of_a_device_are_linear_in_its_inputs_and_those_of_two_are_not_alike() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    data = synthetic(num_devices=20)
    assert data.owners is not None
    first, second = np.argsort(np.bincount(data.owners))[-2:]
    mine, others = data.owners == first, data.owners == second
    model = linear.LogisticRegression(C=1e4, max_iter=2000).fit(data.train_x[mine], data.train_y[mine])
    assert model.score(data.train_x[mine], data.train_y[mine]) > 0.98
    assert model.score(data.train_x[others], data.train_y[others]) < 0.6


def test_synthetic_is_a_function_of_its_seed() -> None:
    assert (synthetic(seed=3).train_x == synthetic(seed=3).train_x).all()
    assert synthetic(seed=3).train_x[0, 0] != synthetic(seed=4).train_x[0, 0]


@pytest.mark.parametrize("options", [{"alpha": -1}, {"beta": float("nan")}, {"num_devices": 0}, {"num_classes": 1}])
def test_synthetic_refuses_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(options))} must be"):
        Part("synthetic", **options).build("data.catalog")


def test_mnist(real: Load) -> None:
    data = real("mnist")
    assert data.train_x.shape == (60_000, 1, 28, 28) and data.test_x.shape == (10_000, 1, 28, 28)
    assert np.bincount(data.train_y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    grey = np.arange(256) * data.scale
    share = np.bincount(data.train_x.ravel(), minlength=256) / data.train_x.size
    assert share @ grey == pytest.approx(0.1307, abs=1e-4)
    assert np.sqrt(share @ grey**2 - (share @ grey) ** 2) == pytest.approx(0.3081, abs=1e-4)


@pytest.mark.slow
def test_fashion_mnist(real: Load) -> None:
    data = real("fashion_mnist")
    assert data.train_x.shape == (60_000, 1, 28, 28) and data.test_x.shape == (10_000, 1, 28, 28)
    assert np.bincount(data.train_y).tolist() == [6000] * 10 and np.bincount(data.test_y).tolist() == [1000] * 10
    assert data.train_y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.train_x.mean() * data.scale == pytest.approx(0.2860, abs=1e-4)


@pytest.mark.slow
def test_cifar10(real: Load) -> None:
    data = real("cifar10")
    assert data.train_x.shape == (50_000, 3, 32, 32) and data.test_x.shape == (10_000, 3, 32, 32)
    assert np.bincount(data.train_y).tolist() == [5000] * 10 and np.bincount(data.test_y).tolist() == [1000] * 10
    assert data.train_y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.train_x[0, :, 0, 0].tolist() == [59, 62, 63]
    means = data.train_x.mean(axis=(0, 2, 3)) * data.scale
    assert means == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)


@pytest.mark.slow
def test_cifar10_is_the_same_from_its_public_home(real: Load, tmp_path: Path) -> None:
    data = real("cifar10")
    packed = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(packed, "w") as tar:
        for number, batch in enumerate((*cifar10.TRAIN_BATCHES, cifar10.TEST_BATCH)):
            rows = slice(number * 10_000, (number + 1) * 10_000)
            x, y = (data.test_x, data.test_y) if number == 5 else (data.train_x[rows], data.train_y[rows])
            records = np.column_stack([y.astype(np.uint8), x.reshape(10_000, -1)]).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{batch}.bin")
            member.size = len(records)
            tar.addfile(member, io.BytesIO(records))
    cifar10.from_records([packed], cifar10.FILES, tmp_path)
    assert [sha256_of(tmp_path / file.name) for file in cifar10.FILES] == [file.sha256 for file in cifar10.FILES]
    assert read_idx(tmp_path / "test-labels.idx")[:4].tolist() == [3, 8, 8, 0]


def text(tokens: Array) -> str:
    return "".join(VOCABULARY[token] for token in tokens.ravel())


def test_shakespeare(real: Load) -> None:
    data = real("shakespeare")
    assert len(VOCABULARY) == len(set(VOCABULARY)) == data.num_classes == 80
    assert data.train_x.shape == data.train_y.shape == (46_480, 80) and data.train_x.dtype == np.uint8
    assert data.num_test == 5_190 and data.tokens and len(data.owner_names) == 801
    assert (data.train_x[:, 1:] == data.train_y[:, :-1]).all()
    assert text(data.train_x[0]).startswith("In delivering my son from me, I bury a second husband.\nWhat hope")
    assert data.owners is not None and np.bincount(data.owners).min() == 5


def test_a_role_has_its_lines_and_no_others(real: Load) -> None:
    data = real("shakespeare")
    hamlet = data.owner_names.index("hamlet: HAM")
    said = text(data.train_x[data.owners == hamlet])
    assert "To be, or not to be,--that is the question:--" in said
    assert "Neither a borrower nor a lender be" not in said
    assert "[" not in said and "Exit" not in said
    polonius = natural(data, seed=0).indices(data.owner_names.index("hamlet: POL"))
    assert "Neither a borrower nor a lender be" in text(data.train_x[polonius])


def test_options_of_shakespeare(real: Load) -> None:
    real("shakespeare")
    short = shakespeare(sequence_length=20, min_characters=20_000, quiet=True)
    assert short.input_shape == (20,) and 20 < len(short.owner_names) < 60
    with pytest.raises(PlanError, match="lower min_characters or sequence_length"):
        shakespeare(min_characters=10**9, quiet=True)


def test_roles_are_found_in_every_way_of_printing_them() -> None:
    capitals = (
        "KING LEAR, a king\n\nACT I.\n\nSCENE I. A heath.\n\n[Enter all.]\n\n"
        "LEAR.\nBlow, [aside] winds!\n\n[Exit\nFool.]\n\nRage!\n\nFOOL\nNuncle.\nLEAR. Crack\n  your cheeks!\n\n"
        "SCENE II.\nAnother heath.\n\nFOOL.\n[Sings]\n\nHey, ho.\n"
    )
    assert roles(capitals) == {"LEAR": "Blow, winds!\nRage!\nCrack\nyour cheeks!", "FOOL": "Nuncle.\nHey, ho."}
    titles = "ACT I.\n\n1 Clown.\nIs she to be buried?\n\nHam.\nWhose grave?\nHam.\n\n1 Clown.\nMine, sir.\n"
    assert roles(titles) == {"1 CLOWN": "Is she to be buried?\nMine, sir.", "HAM": "Whose grave?\nHam."}


def test_the_data_with_owners_are_named_rightly() -> None:
    with_owners = [
        name for name in NAMES if "owners=" in Path(f"{atoll.data.catalog.__path__[0]}/{name}.py").read_text()
    ]
    assert tuple(with_owners) == WITH_OWNERS
