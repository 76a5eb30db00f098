"""The configured corpus, checked against the tokenizer and the model, as three sources of samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron3d.config.schema import Config
from megatron3d.data.indexed import IndexedDataset
from megatron3d.data.samples import Indices, Split, sample_offsets, split_tokens
from megatron3d.data.tokenizer import Tokenizer
from megatron3d.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Samples 0, 1, ... of one split without end, epoch after epoch; shuffled unless seed is None."""

    dataset: IndexedDataset
    split: Split
    seq_length: int
    vocab_size: int
    seed: int | None

    @property
    def num_windows(self) -> int:
        """Number of different samples: the length of an epoch."""
        return self.split.num_windows(self.seq_length)

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """[samples, seq_length + 1] tokens; raises UserError for a token id beyond the vocabulary."""
        offsets = sample_offsets(self.split, self.seq_length, self.seed, samples)
        tokens = self.dataset.windows(offsets, self.seq_length + 1).astype(np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            raise UserError(
                f"data.data_path={self.dataset.prefix}: token {offsets[row] + column} has id {tokens[row, column]}, "
                f"outside the vocabulary of {self.vocab_size}; use the tokenizer that made the corpus"
            )
        return tokens


@dataclass(frozen=True)
class Corpus:
    """Three splits, valid and test in order; None where a split that is not used is shorter than one sample."""

    dataset: IndexedDataset
    train: Samples
    valid: Samples | None
    test: Samples | None

    @property
    def fingerprint(self) -> str:
        """sha256 of the counts, the data type, and 64 pieces of 1024 tokens from all over the corpus."""
        data = self.dataset
        digest = hashlib.sha256(f"{data.num_documents} {data.num_tokens} {data.dtype.str}".encode())
        for start in np.linspace(0, max(0, data.num_tokens - 1024), 64).astype(np.int64).tolist():
            digest.update(data.tokens(start, min(start + 1024, data.num_tokens)).tobytes())
        return digest.hexdigest()


def open_corpus(config: Config, tokenizer: Tokenizer) -> Corpus:
    """The corpus of a configuration; raises UserError unless every sample that the run reads is there and fits."""
    if config.data.data_path is None:
        raise UserError(
            "data.data_path: none given; name the prefix of a .bin/.idx pair that tools/preprocess_data.py made"
        )
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size}: below the tokenizer's {tokenizer.vocab_size} tokens; "
            f"use {tokenizer.vocab_size} or leave it out"
        )
    dataset = IndexedDataset(config.data.data_path)
    _check_tokenizer(dataset, tokenizer, vocab_size)
    splits = split_tokens(dataset.num_tokens, config.data.split)
    _check_lengths(config, splits)
    train, valid, test = (Samples(dataset, split, config.model.seq_length, vocab_size, None) for split in splits)
    return Corpus(
        dataset,
        train=replace(train, seed=config.train.seed),
        valid=valid if valid.num_windows else None,
        test=test if test.num_windows else None,
    )


def _check_tokenizer(dataset: IndexedDataset, tokenizer: Tokenizer, vocab_size: int) -> None:
    made = dataset.manifest
    if made is None:
        return
    if made.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"data.data_path={dataset.prefix}: made with {made.tokenizer_type} {made.fingerprint[:12]} "
            f"({made.vocab_size} tokens), but configured is {type(tokenizer).__name__} {tokenizer.fingerprint[:12]} "
            f"({tokenizer.vocab_size} tokens); set data.tokenizer_type and data.tokenizer_model to its own, "
            "or make the corpus again with tools/preprocess_data.py"
        )
    if made.max_token_id >= vocab_size:
        raise UserError(
            f"data.data_path={dataset.prefix}: largest token id {made.max_token_id} is outside the vocabulary "
            f"of {vocab_size}; make the corpus again with tools/preprocess_data.py"
        )


def _check_lengths(config: Config, splits: tuple[Split, Split, Split]) -> None:
    total = sum(split.num_tokens for split in splits)
    used = {"train": splits[0]} | ({"valid": splits[1]} if config.train.eval_interval else {})
    wanted = config.model.seq_length + 1
    UserError.collect(
        f"data.split={config.data.split}: {name} is {split.num_tokens} of {total} tokens, fewer than one sample of "
        f"model.seq_length + 1 = {wanted}; give {name} a larger weight, use a longer corpus, or set model.seq_length "
        f"to at most {max(1, split.num_tokens - 1)}"
        for name, split in used.items()
        if split.num_tokens < wanted
    )
