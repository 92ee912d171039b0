"""Advanced lung cancer at 18 institutions: survival times. Shapes: N patients, F features."""

from __future__ import annotations

import csv

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import every_fifth, numbered, standardised
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, Pip, RawFile, Source
from atoll.data.targets import SURVIVAL
from atoll.data.unpack import as_is, from_zip

SUMMARY = "survival with advanced lung cancer, 209 patients of 18 institutions, 6 features"
SIZE = "0.4 MB"

CSV = RawFile(
    name="lung.csv", num_bytes=9_041, sha256="16ebd02c38bbb5708186d600cff80ad84d0764974619436f83ba4a605e77eb44"
)
HOME = "https://raw.githubusercontent.com/CamDavidsonPilon/lifelines/master/lifelines/datasets"
WHEEL_SHA256 = "44802480a28d6cb836c7fea4a54ec0ba220eb31c6d7444589637a8bd66066e8c"
SOURCES = (
    Source(route=Https((f"{HOME}/{CSV.name}",)), unpack=as_is),
    Source(route=Pip("lifelines", "0.30.3", WHEEL_SHA256, wheel="py3-none-any"), unpack=from_zip("lifelines/datasets")),
)
FEATURES = ("age", "sex", "ph.ecog", "ph.karno", "pat.karno", "wt.loss")
"""Age, sex, performance by physician's ECOG and Karnofsky and patient's Karnofsky score, and weight loss in pounds."""
NEEDED = ("inst", "time", "status", *FEATURES)


def lung(*, standardise: bool = True, quiet: bool = False) -> Dataset:
    """Load survival in days after randomisation, and deaths (Loprinzi et al. 1994, J. Clinical Oncology 12(3)).

    Owners are the institutions, groups the sexes. Of 228 patients, those without a missing value in the columns that
    are used are kept; calories at meals, missing for every fifth patient, are left out. No split was published: every
    fifth patient of each institution, in a fixed shuffle, is for test. Features are standardised over the training set.
    """
    path = raw_files("lung", (CSV,), SOURCES, quiet=quiet)[CSV.name]
    with path.open(encoding="ascii", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if all(row[column] for column in NEEDED)]
    x_NF = np.array([[float(row[column]) for column in FEATURES] for row in rows])
    y_N2 = np.array([[float(row["time"]), float(row["status"])] for row in rows])
    institutions, owner_N = np.unique([int(float(row["inst"])) for row in rows], return_inverse=True)
    sex_N = numbered([row["sex"] for row in rows], ("1", "2"))
    train, test = every_fifth(owner_N)
    features = standardised(x_NF, train) if standardise else x_NF
    return Dataset(
        name="lung",
        train_x=features[train],
        train_y=y_N2[train],
        test_x=features[test],
        test_y=y_N2[test],
        problem=SURVIVAL,
        owners=owner_N[train],
        owner_names=tuple(f"institution {number}" for number in institutions),
        train_groups=sex_N[train],
        test_groups=sex_N[test],
        group_names=("male", "female"),
        origin="North Central Cancer Treatment Group (Loprinzi et al. 1994), from R's survival, LGPL",
    )
