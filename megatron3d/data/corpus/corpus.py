"""Open the configured corpora, check them against tokenizer and model, and make the samples of three splits.

    data_path, split                                       each corpus is split into train, valid and test
    train_data_path, valid_data_path, test_data_path       each split has corpora of its own

A path is a prefix of token files, several prefixes with weights (blended.py), or in the second form the name of a
Hugging Face dataset (stream.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction

from megatron3d.data.corpus.blend import Blend, Paths, parse_paths, whole_parts
from megatron3d.data.corpus.blended import BlendedSamples, TokenFileSamples
from megatron3d.data.corpus.samples import Split, split_tokens
from megatron3d.data.corpus.spec import CorpusSpec, check_token_ids, vocabulary_problem
from megatron3d.data.corpus.stream import StreamedDataset, StreamedSamples
from megatron3d.data.packing import Packing
from megatron3d.data.preprocess.encode import EncoderSpec
from megatron3d.data.preprocess.hub_datasets import HF_PREFIX, num_shards
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")
CHECKED_DOCUMENTS = 16


@dataclass(frozen=True)
class Corpus:
    """The samples of three splits; None where a split that is not used is shorter than one sample."""

    train: BlendedSamples | StreamedSamples
    valid: BlendedSamples | StreamedSamples | None
    test: BlendedSamples | StreamedSamples | None

    @property
    def faults(self) -> list[str]:
        """Descriptions of the first records that were left out so far."""
        streams = (split for split in (self.train, self.valid, self.test) if isinstance(split, StreamedSamples))
        return [fault for stream in streams for fault in stream.rows.faults]

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """All token files, each once."""
        splits = (split for split in (self.train, self.valid, self.test) if split)
        found = {source.dataset.prefix: source.dataset for split in splits for source in split.sources}
        return tuple(found.values())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a single corpus; of several, sha256 of theirs and of the blends."""
        found = list(self.train.contents)
        if self.valid is not None:
            shares = [split.sources[0].dataset for split in (self.train, self.valid) if split.sources]
            found += [] if len(shares) == 2 and shares[0] is shares[1] else self.valid.contents
        return str(found[0][0]) if len(found) == 1 else hashlib.sha256(str(found).encode()).hexdigest()


def open_corpus(spec: CorpusSpec, tokenizer: Tokenizer, packing: Packing) -> Corpus:
    """Open the corpora; raises UserError unless every sample that the run reads is there and fits tokenizer and
    packing."""
    if spec.data_path is None and spec.train_data_path is None:
        raise UserError(
            "data.data_path: none given; name the prefix of a .bin/.idx pair that tools/preprocess_data.py made"
        )
    vocab_size = spec.vocab_size or tokenizer.vocab_size
    if problem := vocabulary_problem(f"model.vocab_size={vocab_size}", vocab_size, tokenizer.vocab_size):
        raise UserError(problem)
    opener = _Opener(spec, tokenizer, vocab_size, packing)
    if spec.data_path is not None:
        opened = opener.paths("data.data_path", spec.data_path)
        splits: list[BlendedSamples | StreamedSamples | None] = [opener.split(opened, number) for number in range(3)]
    else:
        paths = (spec.train_data_path, spec.valid_data_path, spec.test_data_path)
        keys = (f"data.{name}_data_path" for name in SPLIT_NAMES)
        splits = [
            opener.whole(key, path, number) if path is not None else None
            for number, (key, path) in enumerate(zip(keys, paths, strict=True))
        ]
    assert splits[0] is not None, "a run has something to train on"
    return Corpus(splits[0], splits[1], splits[2])


_Opened = tuple[tuple[IndexedDataset, Fraction], ...]


@dataclass(frozen=True)
class _Opener:
    spec: CorpusSpec
    tokenizer: Tokenizer
    vocab_size: int
    packing: Packing

    def paths(self, key: str, value: Paths) -> _Opened:
        """Open the corpora of a key, with their weights."""
        opened = [(IndexedDataset(prefix), weight) for prefix, weight in parse_paths(key, value)]
        for dataset, _ in opened:
            _check_tokenizer(dataset, self.tokenizer, self.vocab_size)
            _check_documents(dataset, self.packing)
        return tuple((dataset, weight or Fraction(dataset.num_tokens)) for dataset, weight in opened)

    def whole(self, key: str, path: Paths, number: int) -> BlendedSamples | StreamedSamples | None:
        """Open a split with a path of its own: token files, or a dataset."""
        if not (isinstance(path, str) and path.startswith(HF_PREFIX)):
            return self.split(self.paths(key, path), number, is_whole=True)
        spec, tokenizer = self.spec, self.tokenizer
        encoder = EncoderSpec(
            spec.tokenizer_type,
            spec.tokenizer_model,
            tokenizer.fingerprint,
            (spec.stream_key,),
            append_eod=tokenizer.eod is not None,
            skip_bad=spec.skips_bad_records,
            remedy=", or leave such out with data.on_bad_record=skip",
            begin=tokenizer.special.before_text(spec.add_bos_token),
        )
        seed = spec.seed if number == 0 else None
        rows = StreamedDataset(path, num_shards(path), spec.stream_lanes, spec.stream_shuffle_rows, seed, encoder)
        return StreamedSamples(rows, spec.seq_length)

    def split(self, opened: _Opened, number: int, is_whole: bool = False) -> BlendedSamples | None:
        """Return train, valid or test of the corpora; None if it is unused and a corpus has less than one sample."""
        length = self.spec.seq_length
        sources = []
        for index, (dataset, _) in enumerate(opened):
            whole = Split(0, dataset.num_tokens)
            part = whole if is_whole else split_tokens(dataset.num_tokens, self.spec.split)[number]
            seed = self.spec.seed + (index << 64) if number == 0 else None
            sources.append(TokenFileSamples(dataset, part, length, self.vocab_size, seed))
        short = [source for source in sources if not source.num_windows]
        if number == 0 or (number == 1 and self.spec.validates):
            UserError.collect(_too_short(self.spec, SPLIT_NAMES[number], source, is_whole) for source in short)
        if short:
            return None
        return BlendedSamples(tuple(sources), Blend(whole_parts([weight for _, weight in opened])))


def _too_short(spec: CorpusSpec, name: str, source: TokenFileSamples, is_whole: bool) -> str:
    have, total = source.split.num_tokens, source.dataset.num_tokens
    wanted = spec.seq_length + 1
    where = f"data.{name}_data_path={source.dataset.prefix}" if is_whole else f"data.split={spec.split}"
    of = "" if is_whole or isinstance(spec.data_path, str) else f" of {source.dataset.prefix}"
    weight = "" if is_whole else f"give {name} a larger weight, "
    return (
        f"{where}: {name}{of} is {have} of {total} tokens, fewer than one sample of "
        f"model.seq_length + 1 = {wanted}; {weight}use a longer corpus, or set model.seq_length "
        f"to at most {max(1, have - 1)}"
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
    check_token_ids(dataset.prefix, 0, made.max_token_id, vocab_size, f"its largest token id is {made.max_token_id}")


def _check_documents(dataset: IndexedDataset, packing: Packing) -> None:
    """Require that documents end with the tokenizer's token, where that matters; checked on the first ones."""
    if not packing.reason:
        return
    for document in range(min(CHECKED_DOCUMENTS, dataset.num_documents)):
        sequences = dataset.sequences(document)
        if not (sequences and len(sequences[-1]) and sequences[-1][-1] == packing.eod):
            raise UserError(
                f"data.data_path={dataset.prefix}: document {document} does not end with token {packing.eod}, by which "
                f"{packing.reason} finds documents; make the corpus with --append-eod, or set that to false"
            )
