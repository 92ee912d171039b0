"""idx files: what is written is read back, and the bytes never change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from atoll.core.errors import DataError
from atoll.data.idx import Array, read_idx, write_idx


@given(values=arrays(np.uint8, array_shapes(max_dims=4, max_side=5), elements=st.integers(0, 255)))
def test_reading_undoes_writing(tmp_path_factory: pytest.TempPathFactory, values: Array) -> None:
    path = tmp_path_factory.getbasetemp() / "any.idx"
    write_idx(path, values)
    assert read_idx(path).shape == values.shape and (read_idx(path) == values).all()


def test_bytes_are_fixed(tmp_path: Path) -> None:
    write_idx(tmp_path / "a.idx", np.arange(6, dtype=np.uint8).reshape(2, 3).T)
    assert (tmp_path / "a.idx").read_bytes().hex() == "00000802" + "00000003" + "00000002" + "000301040205"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file of unsigned bytes: it starts with nothing"),
        (b"PK\x03\x04rest", "it starts with 50 4b 03 04"),
        (bytes.fromhex("0000080200000003"), "ends inside its header"),
        (bytes.fromhex("000008010000000301"), r"shape \(3,\) in its header but 1 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "bad")
