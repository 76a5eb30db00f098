"""Fact: objects reach rank 0 and all ranks through a tree in a store, in few messages per rank, and none is left there.

Bugs that this finds: a key that another call uses as well, a child that two ranks read, chunks read before all exist.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron3d.comm import objects
from megatron3d.comm.objects import StoreObjects, decode, encode, store_objects
from megatron3d.parallel.mesh import Mesh
from tests.support.pool import Pool


class Counted:
    """Store in memory of ranks that run one after another, so that a value is there before it is read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.sets: Counter[int] = Counter()
        self.gets: Counter[int] = Counter()
        self.rank = 0

    def set(self, key: str, value: bytes) -> None:
        assert key not in self.values, f"{key} is overwritten"
        self.values[key] = value
        self.sets[self.rank] += 1

    def get(self, key: str) -> bytes:
        self.gets[self.rank] += 1
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.mark.parametrize(("num_ranks", "fan_in"), [(2, 32), (33, 32), (34, 32), (40, 3), (4096, 32)])
def test_messages_of_a_rank_have_a_closed_form(num_ranks: int, fan_in: int) -> None:
    store = Counted()
    ranks = [StoreObjects(Mesh((("x", num_ranks),), rank), store, fan_in) for rank in range(num_ranks)]
    gathered: Any = None
    for store.rank in reversed(range(num_ranks)):  # children have higher ranks than their parent
        gathered = ranks[store.rank].gather_object({"rank": store.rank})
        assert store.rank == 0 or gathered is None
    assert gathered == [{"rank": rank} for rank in range(num_ranks)] and not store.values
    last = num_ranks - 1
    children = {rank: max(0, min(fan_in * (rank + 1), last) - fan_in * rank) for rank in range(num_ranks)}
    assert all(store.sets[rank] == (rank > 0) and store.gets[rank] == children[rank] for rank in children)
    assert max(children.values()) <= fan_in and sum(children.values()) == num_ranks - 1
    store.sets.clear()
    store.gets.clear()
    for store.rank in range(num_ranks):
        assert ranks[store.rank].broadcast_object(["all"] if store.rank == 0 else None) == ["all"]
    assert all(store.gets[rank] == (rank > 0) and store.sets[rank] == children[rank] for rank in children)
    assert not store.values


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 160])
def test_large_values_travel_in_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CHUNK_BYTES", 16)
    store, value = Counted(), "v" * size
    first, second = (StoreObjects(Mesh((("x", 2),), rank), store) for rank in range(2))
    second.gather_object(value)
    assert max(map(len, store.values.values())) <= 16 + 8
    assert first.gather_object(None) == [None, value]
    first.broadcast_object(value)
    assert second.broadcast_object(None) == value and not store.values


class Program:
    """Value that runs a program where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_a_stranger_writes_to_the_store_is_not_run(tmp_path: Path) -> None:
    """Bug that this finds: the store unpickles what anybody who reaches its port has written, which runs programs."""
    store, trap = Counted(), tmp_path / "was_run"
    content = pickle.dumps(Program(trap))
    store.values["1/1"] = (1).to_bytes(8, "little") + content
    with pytest.raises(ValueError):
        StoreObjects(Mesh((("x", 2),), 1), store).broadcast_object(None)
    assert not trap.exists()


def test_nothing_in_the_package_unpickles_what_ranks_send() -> None:
    """Files of Megatron-LM are read by an unpickler that refuses every other class."""
    calls = re.compile(r"import pickle|pickle\.loads?\(|(gather_object|broadcast_object_list|scatter_object_list)\(")
    found = [
        f"{path}: {line}"
        for path in Path(objects.__file__).parents[1].rglob("*.py")
        if path.name != "torch_folder.py"
        for line in path.read_text().splitlines()
        if calls.search(line) and ("pickle" in line or "dist." in line)
    ]
    assert not found


@pytest.mark.parametrize(
    "value", [None, True, 3, -0.1, math.inf, "ü\n", [1, [2.5, None]], {"a": {"b": [Path("/x/y"), "/x/y"]}}]
)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert decode(encode(value)) == value
    assert decode(encode((value, np.int64(3)))) == [value, 3]
    assert math.isnan(decode(encode(math.nan)))


def test_values_without_json_are_refused() -> None:
    """Bug that this finds: a number as a key comes back as a text, and is missed there."""
    with pytest.raises(TypeError, match=r"Mesh .* has no JSON"):
        encode([Mesh((("x", 2),))])
    with pytest.raises(TypeError, match="keys"):
        encode({"ranks": {0: "a"}})


def through_the_store(rank: int, world_size: int) -> list[Any]:
    """Run several collectives without a wait between them, over two connections in turns."""
    mesh = Mesh((("x", world_size),), rank)
    one, other = store_objects(mesh), store_objects(mesh)
    found: list[Any] = []
    for count in range(3):
        found += [one.gather_object((rank, count)), other.gather_object(rank)]
        found += [one.broadcast_object(f"{rank} {count}"), other.broadcast_object(rank)]
    return found


def test_processes_gather_and_broadcast_through_the_store(pool: Pool) -> None:
    everyone = list(range(4))
    expected: list[Any] = []
    for count in range(3):
        expected += [[[rank, count] for rank in everyone], everyone, f"0 {count}", 0]
    first, *others = pool.run(through_the_store, 4)
    assert first == expected
    assert others == [[None if isinstance(each, list) else each for each in expected]] * 3
