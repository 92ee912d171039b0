"""Encodings from summaries of sites: equal to a fit on all rows, whatever the sites."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from atoll.core.errors import DataError
from atoll.data.columns import Column
from atoll.data.encoding import MOST_TEXTS, Encoding, Summary, merge, summarise

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))
TEXTS = st.sampled_from([None, "a", "b", "c", "d"])
ROWS = st.lists(st.tuples(VALUES, TEXTS, st.integers(0, 3)), min_size=1, max_size=30)


def columns_of(rows) -> list[Column]:
    numbers = np.array([np.nan if value is None else value for value, *_ in rows], dtype=float)
    texts = np.empty(len(rows), dtype=object)
    texts[:] = [row[1] for row in rows]
    return [Column("number", numbers), Column("text", texts)]


def close(one: Summary, other: Summary) -> bool:
    """Whether two summaries agree up to rounding."""
    for name, each in one.columns.items():
        same = other.columns[name]
        rest = ("kind", "count", "missing", "categories", "rare", "minimum", "maximum")
        if any(getattr(each, field) != getattr(same, field) for field in rest):
            return False
        if not math.isclose(each.mean, same.mean, rel_tol=1e-9, abs_tol=1e-6):
            return False
        if not math.isclose(each.squares, same.squares, rel_tol=1e-9, abs_tol=1e-3):
            return False
    return one.rows == other.rows


@given(ROWS)
def test_a_merge_of_sites_is_the_summary_of_all_rows(rows):
    sites = [[row for row in rows if row[2] == site] for site in range(4)]
    merged = merge([summarise(columns_of(site)) for site in sites if site])
    assert close(merged, summarise(columns_of(rows)))


@given(ROWS, ROWS, ROWS)
def test_merging_is_associative_and_has_a_neutral_element(first, second, third):
    one, two, three = (summarise(columns_of(rows)) for rows in (first, second, third))
    assert close(merge([merge([one, two]), three]), merge([one, merge([two, three])]))
    assert merge([Summary(), one]) == merge([one, Summary()]) == one
    assert close(merge([one, two]), merge([two, one]))


def test_an_encoding_of_sites_is_that_of_scikit_learn_on_all_rows():
    rng = np.random.default_rng(0)
    numbers = rng.normal(5e8, 3.0, 300)  # far from zero, where sums of squares would lose the variance
    texts = rng.choice(["x", "y", "z"], 300).astype(object)
    columns = [Column("number", numbers), Column("text", texts), Column("constant", np.full(300, 0.1))]
    sites = [np.flatnonzero(np.arange(300) % 7 == site) for site in range(7)]
    encoding = Encoding.of(merge([summarise([c.picked(rows) for c in columns]) for rows in sites]))
    encoded = encoding.apply(columns)
    assert np.allclose(encoded[:, :1], StandardScaler().fit_transform(numbers[:, None]), atol=1e-6)
    onehot = OneHotEncoder(sparse_output=False)
    assert np.array_equal(encoded[:, 1:4], onehot.fit_transform(texts[:, None]))
    assert np.abs(encoded[:, 4]).max() < 1e-6
    assert encoding.feature_names == ("number", "text=x", "text=y", "text=z", "constant")


def test_missing_numbers_become_the_mean_and_missing_texts_a_category():
    columns = columns_of([(1.0, "a", 0), (3.0, None, 0), (None, "a", 0)])
    encoding = Encoding.of(summarise(columns))
    assert encoding.feature_names == ("number", "text=a", "text=(missing)")
    assert encoding.apply(columns).tolist() == [[-1, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_rare_categories_are_counted_but_not_named():
    texts = np.array(["flu"] * 9 + ["kuru"], dtype=object)
    summary = summarise([Column("disease", texts), Column("age", np.arange(10.0))], min_count=5)
    assert "kuru" not in summary.to_json()
    assert summary.columns["disease"].rare == 1 and summary.columns["age"].maximum is None
    encoding = Encoding.of(summary)
    assert encoding.feature_names[:2] == ("disease=flu", "disease=(other)")
    assert encoding.apply([Column("disease", texts), Column("age", np.arange(10.0))])[9, :2].tolist() == [0, 1]


def test_the_most_frequent_categories_get_features():
    texts = np.array(["a"] * 3 + ["b"] * 1 + ["c"] * 2, dtype=object)
    encoding = Encoding.of(summarise([Column("t", texts)]), max_categories=2)
    assert encoding.feature_names == ("t=a", "t=c", "t=(other)")
    assert encoding.apply([Column("t", texts)]).sum(0).tolist() == [3, 2, 1]


def test_unknown_categories_are_refused_or_ignored():
    known = Column("t", np.array(["apple", "pear"], dtype=object))
    other = Column("t", np.array(["apple", "peer"], dtype=object))
    with pytest.raises(DataError, match=r"site.csv: category 't' is 'peer', which no site told of in row 2 .*'pear'\?"):
        Encoding.of(summarise([known])).apply([other], "site.csv")
    ignoring = Encoding.of(summarise([known]), unknown="ignore")
    assert ignoring.apply([other]).tolist() == [[1, 0], [0, 0]]


def test_numbers_at_one_site_and_texts_at_another_are_refused():
    numbers, texts = Column("t", np.array([1.0])), Column("t", np.array(["a"], dtype=object))
    with pytest.raises(DataError, match="column 't' holds numbers at one site and texts at another"):
        merge([summarise([numbers]), summarise([texts])])
    with pytest.raises(DataError, match="not all sites summarised the column 't'"):
        merge([summarise([numbers]), summarise([Column("u", np.array([1.0]))])])


def test_a_column_that_is_empty_at_one_site_is_fitted_by_the_others():
    empty, full = Column("t", np.array([np.nan])), Column("t", np.array(["a"], dtype=object))
    encoding = Encoding.of(merge([summarise([empty]), summarise([full])]))
    assert encoding.apply([empty]).tolist() == [[0, 1]]
    with pytest.raises(DataError, match="column 't' has no value in any training row"):
        Encoding.of(summarise([empty]))


def test_texts_that_name_rows_are_refused():
    names = np.array([f"person {n}" for n in range(MOST_TEXTS + 1)], dtype=object)
    with pytest.raises(DataError, match=f"column 'name' has {MOST_TEXTS + 1} different texts"):
        summarise([Column("name", names)])


def test_json_gives_the_same_back_and_refuses_others():
    summary = summarise(columns_of([(1.0, "a", 0), (4.0, None, 0)]), classes=("no", "yes"))
    assert Summary.from_json(summary.to_json()) == summary
    encoding = Encoding.of(summary)
    assert Encoding.from_json(encoding.to_json()) == encoding and encoding.classes == ("no", "yes")
    for text in ("{", "[]", '{"features": [], "extra": 1}'):
        with pytest.raises(DataError, match="is not what `atoll data` writes"):
            Encoding.from_json(text)
    with pytest.raises(DataError, match="has the scale 0"):
        Encoding.from_json('{"features": [{"name": "a", "kind": "number", "std": 0}]}')
    with pytest.raises(DataError, match="schema 2"):
        merge([Summary(schema=2)])
    with pytest.raises(DataError, match="negative count"):
        Summary.from_json('{"columns": {"a": {"kind": "number", "count": -1}}}')
