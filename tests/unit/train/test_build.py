"""Fact: before the first step a run reads a bounded part of a corpus that another program made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron3d.comm.objects import GroupObjects
from megatron3d.data.token_files.indexed import BLOCK
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.build import MAX_BLOCKS, check_without_manifest


class Tokens:
    """Stands for a file of tokens 0 and 1, with one other token, and notes what is read."""

    def __init__(self, num_tokens: int, wrong_at: int) -> None:
        self.num_tokens, self.wrong_at, self.reads = num_tokens, wrong_at, list[int]()
        self.manifest, self.prefix = None, "corpus"

    def tokens(self, start: int, stop: int) -> np.ndarray:
        self.reads.append(start)
        return np.array([0, 1, 9 if start <= self.wrong_at < stop else 1])


def check(data: Tokens) -> None:
    model = SimpleNamespace(comm=GroupObjects(Mesh((("data", 1),))), arch=SimpleNamespace(vocab_size=2))
    corpus: Any = SimpleNamespace(datasets=[data])
    state: Any = SimpleNamespace(model=model)
    check_without_manifest(corpus, state)


def test_a_small_corpus_is_read_whole() -> None:
    for wrong_at in (0, 5 * BLOCK - 1, 5 * BLOCK):
        with pytest.raises(UserError, match="0 to 9"):
            check(Tokens(5 * BLOCK + 1, wrong_at))


def test_a_large_corpus_is_read_at_equal_distances() -> None:
    data = Tokens(10**13, -1)
    check(data)
    assert MAX_BLOCKS / 2 < len(data.reads) <= MAX_BLOCKS, "ten trillion tokens"
    assert len({late - early for early, late in zip(data.reads, data.reads[1:], strict=False)}) == 1
    assert data.reads[-1] > 0.99 * data.num_tokens
