"""The options of the corpora as one plain value; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron3d.data.corpus.blend import Paths
from megatron3d.errors import UserError


@dataclass(frozen=True)
class CorpusSpec:
    """Corpora that a run reads, and the options for reading them.

    Attributes:
        data_path: corpora that `split` divides into train, valid and test; None where each split has its own.
        split: weights of train, valid and test.
        seq_length: tokens of a sample, without the last label.
        seed: seed of the order of the training samples.
        vocab_size: tokens of the model; None: those of the tokenizer.
        validates: whether the run reads the valid split.
        add_bos_token: begin streamed documents with the tokenizer's bos token; None: as the tokenizer declares.
        skips_bad_records: leave out rows of a streamed dataset that cannot be read, instead of stopping.
    """

    data_path: Paths | None
    train_data_path: Paths | None
    valid_data_path: Paths | None
    test_data_path: Paths | None
    split: str
    seq_length: int
    seed: int
    vocab_size: int | None
    validates: bool
    tokenizer_type: str
    tokenizer_model: str | None
    add_bos_token: bool | None
    stream_key: str
    stream_lanes: int
    stream_shuffle_rows: int
    skips_bad_records: bool


def vocabulary_problem(named: str, model_size: int, tokenizer_size: int) -> str | None:
    """Return what is wrong with `model.vocab_size`, as `named`, for a tokenizer; None if the model has its tokens."""
    if model_size >= tokenizer_size:
        return None
    return f"{named}: less than the tokenizer's {tokenizer_size} tokens; use {tokenizer_size} or more, or leave it out"


def check_token_ids(prefix: Path, low: int, high: int, vocab_size: int, found: str | None = None) -> None:
    """Raise UserError, with `found` in words, unless token ids from `low` to `high` are in the vocabulary."""
    if low < 0 or high >= vocab_size:
        found = found or f"its token ids are {low} to {high}"
        raise UserError(
            f"data.data_path={prefix}: {found}, outside the vocabulary of {vocab_size}; "
            "set data.tokenizer_type and data.tokenizer_model to the tokenizer that made the corpus"
        )
