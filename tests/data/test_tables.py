"""Data sets from tables, folders and objects: roles of columns, problems, test rows, and bad input in one line."""

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.preprocessing import StandardScaler

import atoll
from atoll.core.errors import DataError
from atoll.data.columns import read_csv
from atoll.data.dataset import Dataset
from atoll.data.encoding import Encoding, merge
from atoll.data.rows import LazyFeatures
from atoll.data.tables import Roles, site_summary

NUM = 60


@pytest.fixture
def frame() -> pandas.DataFrame:
    rng = np.random.default_rng(1)
    return pandas.DataFrame(
        {
            "age": rng.integers(20, 90, NUM).astype(float),
            "smoker": rng.choice(["yes", "no"], NUM),
            "ward": rng.integers(1, 4, NUM),
            "site": rng.choice(["north", "south", "west"], NUM),
            "sex": rng.choice(["f", "m"], NUM),
            "outcome": rng.choice(["ill", "healthy"], NUM),
            "cost": rng.normal(100, 10, NUM),
            "part": np.where(np.arange(NUM) % 5 == 0, "test", "train"),
        }
    )


@pytest.fixture
def path(frame, tmp_path) -> Path:
    frame.to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


ROLES = {"target": "outcome", "owner": "site", "group": "sex", "features": ["age", "smoker", "ward"]}


def same(one: Dataset, other: Dataset) -> bool:
    arrays = ("train_x", "train_y", "test_x", "test_y", "owners", "train_groups", "test_groups")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and (
        (one.class_names, one.owner_names, one.group_names, one.problem)
        == (other.class_names, other.owner_names, other.group_names, other.problem)
    )


def test_a_csv_file_becomes_a_data_set(path, frame):
    data = Dataset.from_csv(path, test="part", categories=["ward"], **ROLES)
    train = frame[frame.part == "train"]
    assert (data.name, data.num_train, data.num_test, data.problem) == ("patients", 48, 12, "classification")
    assert data.class_names == ("healthy", "ill") and (data.train_y == (train.outcome == "ill")).all()
    assert data.owner_names == ("north", "south", "west")
    assert [data.owner_names[owner] for owner in data.owners] == train.site.tolist()
    assert data.group_names == ("f", "m") and (data.test_groups == (frame[frame.part == "test"].sex == "m")).all()
    assert data.feature_names == ("age", "smoker=no", "smoker=yes", "ward=1", "ward=2", "ward=3")
    scaler = StandardScaler().fit(train[["age"]].to_numpy())  # on training rows only
    assert np.allclose(data.test_x[:, :1], scaler.transform(frame[frame.part == "test"][["age"]].to_numpy()), atol=1e-6)


def test_frames_and_mappings_agree_with_their_file(path, frame):
    data = Dataset.from_csv(path, test="part", **ROLES)
    assert same(Dataset.from_pandas(frame, test="part", **ROLES), data)
    assert same(Dataset.from_pandas(frame.to_dict("list"), test="part", **ROLES), data)


@pytest.mark.parametrize("library", ["polars", "pyarrow", "datasets"])
def test_tables_of_other_libraries_agree(library, path, frame, tmp_path):
    package = pytest.importorskip(library)
    if library == "polars":
        data = Dataset.from_polars(package.from_pandas(frame), test="part", **ROLES)
    elif library == "pyarrow":
        frame.to_parquet(tmp_path / "patients.parquet")
        data = Dataset.from_parquet(tmp_path / "patients.parquet", test="part", **ROLES)
    else:
        data = Dataset.from_huggingface(package.Dataset.from_pandas(frame), test="part", **ROLES)
    assert same(data, Dataset.from_csv(path, test="part", **ROLES))


def test_test_rows_by_share_and_by_file(path, frame, tmp_path):
    share = Dataset.from_csv(path, test=0.25, seed=3, **ROLES)
    assert share.num_test == 15 and same(share, Dataset.from_csv(path, test=0.25, seed=3, **ROLES))
    assert not np.array_equal(share.test_x, Dataset.from_csv(path, test=0.25, seed=4, **ROLES).test_x)
    for part in ("train", "test"):
        frame[frame.part == part].to_csv(tmp_path / f"{part}.csv", index=False)
    files = Dataset.from_csv(tmp_path / "train.csv", test=tmp_path / "test.csv", **ROLES)
    assert same(files, Dataset.from_csv(path, test="part", **ROLES))


def test_problems_are_inferred_or_said(frame):
    features = ["age"]
    cost = Dataset.from_pandas(frame, target="cost", features=features)
    assert cost.problem == "regression" and cost.num_outputs == 1
    assert Dataset.from_pandas(frame, target="ward", features=features).class_names == ("1", "2", "3")
    assert Dataset.from_pandas(frame, target="ward", features=features, problem="regression").problem == "regression"
    binary = Dataset.from_pandas(frame, target="outcome", features=features, problem="binary")
    assert binary.problem == "binary" and set(binary.train_y) == {0, 1}
    frame["event"], frame["late"] = np.arange(NUM) % 2, np.arange(NUM) % 3 == 0
    survival = Dataset.from_pandas(frame, target=("age", "event"), features=["cost"], problem="survival")
    assert survival.train_y.shape[1] == 2
    several = Dataset.from_pandas(frame, target=("event", "late"), features=["cost"])
    assert several.problem == "multi_label" and several.class_names == ("event", "late")
    with pytest.raises(DataError, match="survival times cannot be negative: got -5"):
        Dataset.from_pandas(frame.assign(age=-5.0), target=("age", "event"), features=["cost"], problem="survival")


def test_sites_that_share_an_encoding_get_the_features_of_the_pooled_table(path, frame, tmp_path):
    """What two sites do: summarise, merge elsewhere, encode. No file holds a row of another site."""
    roles = Roles(target="outcome", features=("age", "smoker", "ward"))
    sites = []
    for name, rows in frame.groupby("site"):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        sites.append(tmp_path / f"{name}.csv")
    summary = merge([site_summary(read_csv(each), roles) for each in sites])
    (tmp_path / "encoding.json").write_text(Encoding.of(summary).to_json())
    options = {"target": "outcome", "encoding": tmp_path / "encoding.json", "test": 0.2}
    own = [Dataset.from_csv(each, **options) for each in sites]
    pooled = Encoding.of(site_summary(read_csv(path), roles))
    whole = pooled.apply([read_csv(path).column(name) for name in roles.features])
    rows = np.concatenate([part for data in own for part in (data.train_x, data.test_x)])
    assert np.allclose(np.sort(rows, axis=0), np.sort(whole, axis=0), atol=1e-6)
    assert {data.class_names for data in own} == {("healthy", "ill")}


def test_a_site_without_one_of_the_classes_numbers_them_alike(frame, tmp_path):
    summaries = [site_summary_of(frame[frame.outcome == outcome], tmp_path) for outcome in ("ill", "healthy")]
    encoding = Encoding.of(merge(summaries))
    ill = Dataset.from_pandas(frame[frame.outcome == "ill"], target="outcome", encoding=encoding)
    assert set(ill.train_y) == {1} and ill.num_classes == 2


def site_summary_of(frame: pandas.DataFrame, tmp_path: Path):
    frame[["age", "outcome"]].to_csv(tmp_path / "one.csv", index=False)
    return site_summary(read_csv(tmp_path / "one.csv"), Roles(target="outcome"))


def test_a_table_trains(path):
    data = Dataset.from_csv(path, test="part", **ROLES)
    plan = atoll.Plan(data=data, partition="natural", rounds=2)
    assert atoll.run(plan).history[-1]["round"] == 2


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "bad.csv").write_text(text)
    return tmp_path / "bad.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,target\n", "has no rows"),
        ("a,outcome\n1,x\n2,y\n", "has no target column 'target'"),
        ("a,targt\n1,x\n2,y\n", "has no target column 'target': did you mean 'targt'"),
        ("a,a,target\n1,2,x\n", "has several columns named 'a': rename all but one"),
        ("a,,target\n1,2,x\n", "has a column without a name, number 2"),
        ("a,target\n1,x\n2\n", r"line 3 has 1 values, but there are 2 columns"),
        ("a,target\n1,x\n2,\n3,y\n", r"target 'target' is missing in row 2 \(1 such\): drop these rows"),
        ("a,target\n,x\n?,y\nNA,x\n", "column 'a' has no value in any training row"),
        ("a,target\n1,x\n2,y\nlow,x\n", r"column 'a' mixes 2 numbers with texts such as 'low' in row 3"),
        ("a,target\n2020-01-31,x\n2021-02-01,y\n", "column 'a' holds dates such as 2020-01-31"),
        ("a,target\n31.12.2020,x\n1.2.2021,y\n", "column 'a' holds dates such as 31.12.2020"),
        ("a,target\n1,x\n2,x\n", "has the classes x: give at least two classes"),
        ("target\n1\n2\n", "has no feature columns"),
        ("a,target\n1,x\n", "at least 2 are needed"),
    ],
)
def test_bad_tables_are_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        Dataset.from_csv(written(tmp_path, text), target="target")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ownr": "site"}, "there is no option 'ownr' of a table: did you mean 'owner'"),
        ({"owner": "sit"}, "has no owner column 'sit': did you mean 'site'"),
        ({"group": "sx"}, "has no group column 'sx': did you mean 'sex'"),
        ({"features": ["agee"]}, "has no feature column 'agee': did you mean 'age'"),
        ({"features": ["outcome"]}, "'outcome' is the target and cannot be a feature too"),
        ({"categories": ["wards"]}, "has no column 'wards', which categories names: did you mean 'ward'"),
        ({"test": "prt"}, "has no test column 'prt', nor is there such a file: did you mean 'part'"),
        ({"test": "sex"}, "test column 'sex' has . in row 1: mark rows with 0 and 1"),
        ({"test": 1.5}, r"test is a share in \(0, 1\)"),
        ({"problem": "regression"}, "target 'outcome' holds texts, but regression needs numbers"),
        ({"problem": "survival"}, "target 'outcome' holds texts|survival needs two targets"),
        ({"encoding": None}, "column 'smoker' holds texts: use encoding='federated'"),
        ({"encoding": "nowhere.json"}, "nowhere.json cannot be read: No such file"),
    ],
)
def test_bad_roles_are_refused_in_one_line(options, message, path):
    with pytest.raises(DataError, match=message):
        Dataset.from_csv(path, **{**ROLES, "test": 0.2, **options})


def test_a_column_that_is_left_out_may_hold_anything(tmp_path):
    path = written(tmp_path, "when,a,target\n2020-01-01,1,x\n,2,y\n,3,x\n,4,y\n,5,x\n")
    assert Dataset.from_csv(path, target="target", features=["a"]).num_train == 4


def test_typed_columns_of_frames_are_refused_where_no_model_takes_them(frame):
    options = {"target": "outcome", "features": ["bad"]}
    for values, message in (
        (pandas.date_range("2020-01-01", periods=NUM), "column 'bad' holds dates such as 2020-01-01"),
        ([1, "a"] * (NUM // 2), "column 'bad' mixes 30 numbers with texts such as 'a' in row 2"),
        ([None] * NUM, "column 'bad' has no value in any training row"),
        ([np.inf] * NUM, "column 'bad' has Inf in row 1"),
        ([{1}] * NUM, "column 'bad' holds set in row 1"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset.from_pandas(frame.assign(bad=values), **options)


def test_missing_values_of_every_kind_are_read(frame):
    frame["age"] = frame["age"].astype("Int64").where(np.arange(NUM) % 7 > 0)
    frame["smoker"] = frame["smoker"].where(np.arange(NUM) % 7 > 0)
    data = Dataset.from_pandas(frame, test="part", **ROLES)
    assert "smoker=(missing)" in data.feature_names and np.isfinite(data.train_x).all()


def images(tmp_path: Path, sites: tuple[str, ...] = ("",), num: int = 5) -> Path:
    for site in sites:
        for label, colour in (("cat", 10), ("dog", 200)):
            folder = tmp_path / "pets" / site / label
            folder.mkdir(parents=True)
            for number in range(num):
                Image.new("RGB", (6, 4), (colour + number, 0, 0)).save(folder / f"{number}.png")
    return tmp_path / "pets"


def test_images_in_folders_are_read_when_needed(tmp_path):
    data = Dataset.from_folder(images(tmp_path), test=0.2)
    assert isinstance(data.train_x, LazyFeatures) and data.input_shape == (3, 4, 6) and data.train_x.dtype == np.uint8
    assert data.class_names == ("cat", "dog") and data.num_test == 2
    assert ((data.train_x[:][:, 0, 0, 0] >= 200) == data.train_y).all()
    grey = Dataset.from_folder(tmp_path / "pets", size=(8, 8), channels=1)
    assert grey.input_shape == (1, 8, 8)


def test_folders_of_sites_are_owners_and_train(tmp_path):
    data = Dataset.from_folder(images(tmp_path, ("north", "south")), sites=True)
    assert data.owner_names == ("north", "south")
    result = atoll.run(atoll.Plan(data=data, partition="natural", rounds=1, engine={"name": "processes", "workers": 2}))
    assert result.history[-1]["round"] == 1


def test_bad_folders_are_refused_in_one_line(tmp_path):
    folder = images(tmp_path)
    broken = folder / "cat" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"3.png is no image that can be read: .*; repair or remove it"):
        Dataset.from_folder(folder)
    broken.write_text("no image")
    with pytest.raises(DataError, match=r"3.png is no image that can be read"):
        Dataset.from_folder(folder)
    broken.unlink()
    with pytest.raises(DataError, match="does not lie in site/class/image"):
        Dataset.from_folder(folder, sites=True)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no images"):
        Dataset.from_folder(folder)
    with pytest.raises(DataError, match="there is no folder"):
        Dataset.from_folder(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none holds no images"):
        Dataset.from_folder(tmp_path / "none")
    with pytest.raises(DataError, match="channels is 1"):
        Dataset.from_folder(folder, channels=2)


class Pairs:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index % 2


def test_map_style_objects_and_tensor_data_sets():
    data = Dataset.from_torch(Pairs(), test=0.2)
    assert isinstance(data.train_x, LazyFeatures) and data.num_classes == 2 and data.num_train == 8
    assert (data.train_x[:][:, 0] % 2 == data.train_y).all()
    x, y = torch.rand(10, 3), torch.arange(10) % 3
    tensors = Dataset.from_torch(torch.utils.data.TensorDataset(x, y), test=Pairs())
    assert tensors.num_classes == 3 and np.array_equal(tensors.train_x, x.numpy())
    with pytest.raises(DataError, match="a sample is int: it must be a pair"):
        Dataset.from_torch([1, 2, 3])
    with pytest.raises(DataError, match="generator cannot be read by index"):
        Dataset.from_torch(pair for pair in [(1, 2)])


def test_arrays_are_split_with_their_owners_and_groups(tmp_path):
    x, y = np.arange(20, dtype=np.float32)[:, None], np.array(["b", "a"] * 10)
    data = Dataset.from_arrays(x, y, test=0.25, owners=np.arange(20), groups=np.arange(20) % 2)
    assert data.class_names == ("a", "b") and data.num_test == 5
    assert (data.owners == data.train_x[:, 0]).all() and (data.test_groups == data.test_x[:, 0] % 2).all()
    np.save(tmp_path / "x.npy", x)
    mapped = Dataset.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), y, test=0.25)
    assert isinstance(mapped.train_x, LazyFeatures) and np.array_equal(mapped.test_x, data.test_x)
    with pytest.raises(DataError, match="20 samples but 3 targets"):
        Dataset.from_arrays(x, y[:3])


def test_images_of_hugging_face_are_read_lazily():
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (6, 4), (n, 0, 0)) for n in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    face = datasets.Dataset.from_dict({"image": pictures, "label": [n % 2 for n in range(10)]}, features=features)
    data = Dataset.from_huggingface(face, features="image", target="label")
    assert (
        isinstance(data.train_x, LazyFeatures) and data.input_shape == (3, 4, 6) and data.class_names == ("no", "yes")
    )
    assert (data.train_x[:][:, 0, 0, 0] % 2 == data.train_y).all()
    both = datasets.DatasetDict({"train": face, "test": face.select(range(4))})
    assert Dataset.from_huggingface(both, features="image", target="label").num_test == 4
    with pytest.raises(DataError, match="no target column 'labl': did you mean 'label'"):
        Dataset.from_huggingface(face, features="image", target="labl")
