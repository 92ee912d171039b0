"""Features that are read by index: the same bits as in memory, in every engine, with bounded memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import DataError
from atoll.core.parts import Part
from atoll.data.dataset import Dataset
from atoll.data.public.held_out import held_out
from atoll.data.rows import ChainedRows, LazyFeatures, MapRows, PickedRows, extremes, file_rows, is_lazy, loaded

ENGINES = [Part("inline"), Part("vectorised", stack=4), Part("processes", workers=2)]


def digits() -> Dataset:
    return Part("digits").build("data.catalog")


class Counting:
    """A row source that only satisfies the protocol: rising indices, each once."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        assert (np.diff(indices) > 0).all()
        self.read += len(indices)
        return self.array[indices]


def mapped(array: np.ndarray, path: Path) -> np.memmap:
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def trained(dataset: Dataset, **settings: object) -> torch.Tensor:
    plan = atoll.Plan(
        data=lambda: dataset, partition={"name": "iid", "num_clients": 8}, rounds=2, policy={"size": 5}, **settings
    )
    return atoll.run(plan).params_D


@pytest.mark.parametrize("engine", ENGINES, ids=lambda part: part.name)
@pytest.mark.parametrize("kind", ["uint8", "float64", "rows"])
def test_lazy_features_give_the_bits_of_those_in_memory(engine, kind, tmp_path):
    data = digits()
    lazy = {
        "uint8": lambda x, name: mapped(x, tmp_path / name),
        "float64": lambda x, name: mapped(x.astype(np.float64), tmp_path / name),
        "rows": lambda x, name: Counting(x),
    }[kind]
    stored = replace(data, train_x=lazy(data.train_x, "a.npy"), test_x=lazy(data.test_x, "b.npy"))
    assert isinstance(stored.train_x, LazyFeatures) and isinstance(stored.test_x, LazyFeatures)
    settings = {"engine": engine, "evaluation": {"every": 1, "clients_every": 1, "holdout": 0.2}}
    assert torch.equal(trained(stored, **settings), trained(data, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"server": {"samples": 20, "source": "public"}, "public": "held_out", "aggregator": "fltrust"},
        {"algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}},
        {"attack": "backdoor", "attackers": {"num": 2}},
        {"partition": Part("iid", num_clients=8) | Part("rotation")},
        {"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}},
    ],
    ids=["server", "public", "attack", "skew", "private"],
)
def test_everything_that_looks_at_samples_takes_lazy_ones(settings, tmp_path):
    data = digits()
    stored = replace(data, train_x=mapped(data.train_x, tmp_path / "x.npy"))
    common = {"rounds": 2, "policy": {"size": 4}, "partition": {"name": "iid", "num_clients": 8}, "engine": "inline"}
    common |= settings
    plans = [atoll.Plan(data=lambda kind=kind: kind, **common) for kind in (data, stored)]
    results = [atoll.run(plan) for plan in plans]
    if "privacy" not in settings:  # its noise is secret, so that no two runs agree
        assert torch.equal(results[0].params_D, results[1].params_D)
    assert results[1].history[-1]["round"] == 2


def test_only_what_is_needed_is_read():
    data = digits()
    source = Counting(data.train_x)
    stored = replace(data, train_x=source)
    assert source.read == 1  # one sample, to see that it can be read
    stored.train_x[np.array([5, 5, 3, 5])]
    assert source.read == 3


def test_repeated_and_unordered_indices_give_their_rows():
    x = np.arange(12.0).reshape(6, 2)
    lazy = LazyFeatures(Counting(x), "mine")
    assert np.array_equal(lazy[np.array([4, 1, 4, 0])], x[[4, 1, 4, 0]])
    assert np.array_equal(lazy[1:5:2], x[1:5:2]) and np.array_equal(lazy[3], x[3])
    assert np.array_equal(lazy[np.array([2, 1, 0])], x[[2, 1, 0]])
    assert lazy[np.array([], dtype=int)].shape == (0, 2)
    assert np.array_equal(np.asarray(lazy), x) and extremes(lazy) == (0, 11)


def test_chained_and_picked_rows_are_those_of_their_sources():
    x = np.arange(10.0).reshape(5, 2)
    chained = LazyFeatures(ChainedRows(Counting(x), x + 100), "both")
    assert np.array_equal(chained[np.array([9, 0, 4, 5])], np.concatenate([x, x + 100])[[9, 0, 4, 5]])
    picked = LazyFeatures(PickedRows(LazyFeatures(Counting(x), "x"), np.array([4, 2, 0])), "some")
    assert np.array_equal(picked[np.array([0, 2])], x[[4, 0]])


def test_what_is_read_is_no_part_of_the_source(tmp_path):
    tokens = np.arange(6).reshape(3, 2)
    lazy = LazyFeatures(Counting(tokens), "mine", tokens=True)
    lazy[np.array([0, 1, 2])][:] = 9
    assert tokens.max() == 5


def test_which_features_are_lazy(tmp_path):
    array = np.zeros((4, 2))
    memmap = mapped(array, tmp_path / "x.npy")
    assert is_lazy(memmap) and is_lazy(memmap[1:]) and is_lazy(np.asarray(memmap)) and is_lazy(memmap.reshape(4, 1, 2))
    assert not is_lazy(memmap[[0, 1]]) and not is_lazy(array) and not is_lazy(torch.zeros(4, 2))
    assert not is_lazy([[0.0], [1.0]]) and is_lazy(Counting(array)) and is_lazy(MapRows([np.zeros(2)]))


@pytest.mark.parametrize(
    ("rows", "index", "message"),
    [
        (np.array([[1.0], [np.nan]]), 1, "mine: a NaN or Inf value in row 1; drop such rows"),
        (np.array([["a"], ["b"]]), 0, "mine: features are uint8 or floats, got <U1; convert them"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_read(rows, index, message):
    with pytest.raises(DataError, match=message):
        LazyFeatures(Counting(rows), "mine")[index]


def test_a_source_that_fails_or_lies_about_its_shape_is_named():
    class Lying(Counting):
        def __getitem__(self, indices):
            return self.array[indices][:, :1]

    with pytest.raises(DataError, match=r"mine: samples 0 were read with shape \(1, 1\), not \(1, 2\)"):
        LazyFeatures(Lying(np.zeros((3, 2))), "mine")
    with pytest.raises(DataError, match="sample 1 has shape"):
        LazyFeatures(MapRows([np.zeros(2), np.zeros(3)]), "mine")[1]
    with pytest.raises(DataError, match=r"gone.npy cannot be read: FileNotFoundError"):
        file_rows(["gone.npy"], np.load)
    with pytest.raises(DataError, match="tokens cannot be negative"):
        LazyFeatures(Counting(np.array([[-1]])), "mine", tokens=True)


def test_features_too_large_to_load_are_refused(monkeypatch):
    monkeypatch.setattr("atoll.data.rows.LOADED_BYTES", 10)
    with pytest.raises(DataError, match="rotation needs all features in memory"):
        loaded(LazyFeatures(Counting(np.zeros((4, 2))), "mine"), "rotation")


def test_files_are_read_when_they_are_needed(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full((2, 2), number, dtype=np.float32))
    rows = file_rows(sorted(tmp_path.glob("*.npy")), np.load)
    (tmp_path / "3.npy").unlink()
    lazy = LazyFeatures(rows, "files")
    assert lazy.shape == (4, 2, 2) and lazy[np.array([2, 1])][:, 0, 0].tolist() == [2, 1]
    with pytest.raises(DataError, match=r"3.npy cannot be read"):
        lazy[3]


def test_public_samples_leave_with_their_groups():
    data = replace(digits(), train_groups=np.arange(digits().num_train) % 2, group_names=("a", "b"))
    remaining, _ = held_out(data, fraction=0.1)
    assert len(remaining.train_groups) == remaining.num_train


def test_a_client_app_takes_lazy_features(tmp_path):
    data = digits()
    app = atoll.ClientApp(train_x=mapped(data.train_x, tmp_path / "x.npy"), train_y=data.train_y, num_classes=10)
    assert isinstance(app.dataset().train_x, LazyFeatures)
    assert np.array_equal(app.dataset().test_x, data.train_x[:1])


SCRIPT = """
import json, os, sys, threading
import numpy as np
import atoll

path, rows, width, engine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
most, done = 0, threading.Event()

def own(pid):
    try:
        lines = open(f"/proc/{pid}/status").read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def family():
    ids = [os.getpid()]
    for task in os.listdir("/proc/self/task"):
        ids += map(int, open(f"/proc/self/task/{task}/children").read().split())
    return sum(own(pid) for pid in ids)

def watch():
    global most
    while not done.wait(0.01):
        most = max(most, family())

base = family()
x = np.memmap(path, np.float32, "r", shape=(rows, width))
y = np.arange(rows) % 2
data = atoll.Dataset(name="large", train_x=x, train_y=y, test_x=x[:2000], test_y=y[:2000], num_classes=2)
threading.Thread(target=watch, daemon=True).start()
plan = atoll.Plan(
    data=lambda: data, partition={"name": "iid", "num_clients": 64}, policy={"size": 8}, rounds=2, engine=engine,
    local={"steps": 20, "batch_size": 32, "lr": 0.1}, evaluation={"every": 1, "clients_every": 2},
)
result = atoll.run(plan)
most = max(most, family())
done.set()
print(json.dumps({"rounds": result.history[-1]["round"], "own": most / 1024, "base": base / 1024}))
"""


def own_megabytes(tmp_path: Path, rows: int, width: int, engine: Part) -> dict[str, float]:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(rows * width * 4)  # a sparse file takes no room on the disk
    command = [sys.executable, "-c", SCRIPT, str(path), str(rows), str(width), json.dumps(engine.to_dict())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("engine", ENGINES, ids=lambda part: part.name)
def test_a_file_of_eight_gigabytes_trains_in_one_and_a_half(engine, tmp_path):
    measured = own_megabytes(tmp_path, 1 << 19, 1 << 12, engine)
    assert measured["rounds"] == 2 and measured["own"] < 1500


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_file_larger_than_the_allowed_memory_trains(tmp_path):
    measured = own_megabytes(tmp_path, 1 << 16, 1 << 12, Part("vectorised", stack=4))  # 1 GB
    assert measured["rounds"] == 2 and measured["own"] < 700
