"""Files of tensors are those that safetensors writes, to the byte, and nothing is copied on the way."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from atoll.core.tensor_file import DTYPES, tensor_file

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
TENSORS = st.builds(
    lambda dtype, shape: torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape),
    st.sampled_from(sorted(DTYPES, key=str)),
    st.lists(st.integers(0, 4), max_size=3),
)


@given(st.dictionaries(NAMES, TENSORS, max_size=6), st.text(max_size=20))
def test_the_bytes_are_those_of_safetensors(tensors: dict[str, torch.Tensor], text: str) -> None:
    for metadata in ({}, {"text": text}):
        assert b"".join(tensor_file(tensors, metadata)) == save(tensors, metadata=metadata or None)


def test_tensors_may_share_memory_and_are_not_copied() -> None:
    whole = torch.arange(1000.0)
    parts = list(tensor_file({"whole": whole, "half": whole[:500], "scattered": whole[::2]}))
    found = load(b"".join(parts))
    assert torch.equal(found["whole"], whole) and torch.equal(found["scattered"], whole[::2])
    assert torch.equal(found["half"], whole[:500])
    whole[0] = 7.0
    assert load(b"".join(parts))["half"][0] == 7.0  # a look at the tensor itself
