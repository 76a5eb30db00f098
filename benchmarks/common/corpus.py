"""Small texts and token files that the benchmarks write themselves."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from megatron3d.data.token_files.indexed import token_dtype
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer

DOCUMENTS, LENGTH = 64, 4096


def write_text(path: Path) -> Path:
    """Write the source of a module of the standard library."""
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def write_random_bytes(prefix: Path) -> Path:
    """Write a token file of random bytes."""
    tokenizer, rng = ByteTokenizer(None), np.random.default_rng(0)
    kind = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(prefix, kind) as writer:
        for _ in range(DOCUMENTS):
            writer.add(rng.integers(256, size=LENGTH).astype(kind), np.array([LENGTH], np.int32))
        writer.finish(tokenizer)
    return prefix
