"""`atoll data summarise` and `atoll data encode`: what is written, and what is refused."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.core.errors import DataError
from atoll.data.encoding import Encoding, Summary

CLINICS = Path(__file__).parents[2] / "examples" / "clinics"


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, words)], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_summaries_of_sites_become_one_encoding(tmp_path):
    for site in ("north", "south"):
        out = tmp_path / f"{site}.json"
        said = typed("summarise", CLINICS / f"{site}.csv", "--target", "outcome", "--min-count", 3, "--out", out)
        assert "classes healthy, ill" in said and str(out) in said
    north = Summary.from_json((tmp_path / "north.json").read_text())
    assert north.rows == 80 and north.columns["age"].minimum is None
    said = typed("encode", tmp_path / "north.json", tmp_path / "south.json", "--out", tmp_path / "encoding.json")
    assert "2 sites, 140 rows" in said
    encoding = Encoding.read(tmp_path / "encoding.json")
    assert encoding.feature_names[:3] == ("age", "smoker=no", "smoker=yes") and encoding.unknown == "refuse"
    typed("encode", tmp_path / "north.json", "--ignore-unknown", "--out", tmp_path / "other.json")
    assert Encoding.read(tmp_path / "other.json").unknown == "ignore"


def test_features_codes_and_problem_can_be_said(tmp_path):
    (tmp_path / "t.csv").write_text("a,code,b,y\n1,1,2,3\n2,2,3,4\n")
    words = ("--target", "y", "--feature", "a", "--feature", "code", "--category", "code", "--problem", "regression")
    typed("summarise", tmp_path / "t.csv", *words, "--out", tmp_path / "s.json")
    summary = Summary.from_json((tmp_path / "s.json").read_text())
    assert {name: each.kind for name, each in summary.columns.items()} == {"a": "number", "code": "category"}
    assert summary.classes == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("summarise", CLINICS / "north.csv", "--target", "outcom"), "did you mean 'outcome'"),
        (("summarise", CLINICS / "nowhere.csv", "--target", "y"), "nowhere.csv cannot be read as CSV: No such file"),
        (("encode", CLINICS / "north.csv"), "is not what `atoll data` writes"),
        (("encode", "nowhere.json"), "nowhere.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(words, message):
    with pytest.raises(DataError, match=message):
        typed(*words)
