"""Fact: an index stores exactly what it was given; a damaged, foreign or malicious one is refused with a reason."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron3d.checkpoint.index import Index, read_index
from megatron3d.checkpoint.store import Piece, load
from megatron3d.errors import UserError


def problems_of(action, *arguments):
    """Return the problems of the UserError that the action raises."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    return caught.value.problems


def edit(folder, change):
    """Change the index as JSON and update its checksum, as an attacker would."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    try:
        path.write_text(Index.model_validate(index, strict=False).to_json())
    except ValidationError:
        path.write_text(json.dumps(index))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_meta_survives_exactly(meta):
    index = Index(iteration=0, meta=meta, tensors={})
    assert Index.model_validate_json(index.model_dump_json()).meta == meta


def test_meta_keeps_nan():
    index = Index(iteration=0, meta={"loss": float("nan")}, tensors={})
    assert str(Index.model_validate_json(index.model_dump_json()).meta["loss"]) == "nan"


def _drop_box(index):
    index["tensors"]["w"]["boxes"].pop()


def _add_box(index):
    index["tensors"]["w"]["boxes"] *= 2


def _lie(index):
    boxes = index["tensors"]["w"]["boxes"]
    boxes[0]["key"], boxes[0]["file"] = boxes[1]["key"], boxes[1]["file"]


def _lead_out(index):
    index["tensors"]["w"]["boxes"][0]["file"] = "../rank_00000.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop_box, "index.json is damaged: tensor w: elements [1:3,0:2] are in 0 boxes instead of one"),
        (_add_box, "index.json is damaged: tensor w: elements [0:1,0:2] are in 2 boxes instead of one"),
        (_lie, "rank_00001.safetensors: w[1:3,0:2] is [2, 2], not [1, 2]"),
        (_lead_out, "index.json is damaged: tensors.w.boxes.0.file String should match pattern"),
        (lambda index: index.pop("meta"), "index.json is damaged: meta Field required"),
        (lambda index: index.update(more=1), "index.json is damaged: more Extra inputs are not permitted"),
        (lambda index: index.update(version=3, more=1), "is of version 3, this megatron3d reads 2"),
        (
            lambda index: index.update(version=1),
            "is of version 1, this megatron3d reads 2; use the",
        ),
        (lambda index: index.update(format="zarr"), "is a 'zarr', not a 'megatron3d checkpoint'"),
    ],
)
def test_damaged_index(saved, change, words):
    edit(saved, change)
    (problem,) = problems_of(load, saved, [Piece("w", (3, 2), ((0, 3), (0, 2)), torch.zeros(3, 2))])
    assert problem.startswith(f"checkpoint {saved}")
    assert words in problem


def test_truncated_and_foreign_index(saved):
    index = saved / "index.json"
    index.write_bytes(index.read_bytes()[:-10])
    assert "index.json is damaged: Invalid JSON" in problems_of(read_index, saved)[0]
    index.unlink()
    assert "is not a megatron3d checkpoint: it has no index.json" in problems_of(read_index, saved)[0]
    assert "does not exist" in problems_of(read_index, saved / "absent")[0]


def test_every_damaged_byte_of_the_index_is_found(saved):
    """After any changed byte the index is refused or has equal contents."""
    path = saved / "index.json"
    content = path.read_bytes()
    before = Index.model_validate_json(content)
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert read_index(saved) == before, f"byte {place}"
        except UserError as error:
            assert f"checkpoint {saved}" in str(error)
