"""Fact: files written here open in megatron-core's IndexedDataset with equal content, and vice versa."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron3d.data.token_files.indexed import IndexedDataset, token_dtype
from megatron3d.data.token_files.writer import ENDS_DOCUMENT, ENDS_SEQUENCE, IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Import megatron-core's module, which warns about packages that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "megatron.core.datasets.indexed_dataset",
            reason="megatron-core is not installed: pip install --no-deps megatron-core",
        )


def documents(dtype: np.dtype[Any]) -> list[list[np.ndarray]]:
    """Draw documents of one to three sentences, one of them empty; ids up to the largest of the dtype."""
    draw = np.random.default_rng(1)
    top = np.iinfo(dtype).max
    found = [[draw.integers(top, size=draw.integers(1, 9), endpoint=True) for _ in range(n % 3 + 1)] for n in range(40)]
    found[7] = [np.empty(0, np.int64)]
    return [[sentence.astype(dtype) for sentence in document] for document in found]


@pytest.mark.parametrize("vocab_size", [257, 100_000])
def test_megatron_opens_our_files(theirs: Any, tmp_path: Path, vocab_size: int) -> None:
    dtype = token_dtype(vocab_size)
    with IndexedWriter(tmp_path / "c", dtype) as writer:
        for document in documents(dtype):
            marks = np.array([ENDS_SEQUENCE] * (len(document) - 1) + [ENDS_DOCUMENT])
            writer.add(np.concatenate(document), np.array([len(sentence) for sentence in document]), marks)
        writer.finish(ByteTokenizer(None))
    opened, sentences = theirs.IndexedDataset(str(tmp_path / "c")), [s for d in documents(dtype) for s in d]
    assert len(opened) == len(sentences) and opened.index.dtype == dtype
    assert all(np.array_equal(opened[n], sentence) for n, sentence in enumerate(sentences))
    ends = np.cumsum([0, *(len(document) for document in documents(dtype))])
    assert np.array_equal(opened.document_indices, ends)


@pytest.mark.parametrize("vocab_size", [257, 100_000])
def test_megatrons_files_are_read(theirs: Any, tmp_path: Path, vocab_size: int) -> None:
    import torch

    dtype = theirs.DType.optimal_dtype(vocab_size)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=dtype)
    for document in documents(np.dtype(dtype)):
        for sentence in document:
            builder.add_item(torch.from_numpy(sentence.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(tmp_path / "c.idx"))
    opened = IndexedDataset(tmp_path / "c")
    opened.verify()
    assert opened.dtype == dtype and opened.num_documents == 40
    for number, document in enumerate(documents(np.dtype(dtype))):
        found = opened.sequences(number)
        assert all(np.array_equal(one, other) for one, other in zip(found, document, strict=True))


def test_both_write_the_same_bytes(theirs: Any, tmp_path: Path) -> None:
    import torch

    dtype = token_dtype(257)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in documents(dtype):
            whole = np.concatenate(document)
            writer.add(whole, np.array([len(whole)]))
            builder.add_item(torch.from_numpy(whole.astype(np.int64)))
            builder.end_document()
        writer.finish(ByteTokenizer(None))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
