"""Open the configured corpora, check them against tokenizer and model, and make the samples of three splits.

    data_path, split                                       each corpus is split into train, valid and test
    train_data_path, valid_data_path, test_data_path       each split has corpora of its own
    sample i of a blend                                    sample j of source s,   (s, j) = blend(i)

A path is a prefix of token files, or several with weights; in the second form also the name of a Hugging Face dataset,
or several with weights (stream.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron3d.data.corpus.plan import (
    Blend,
    CorpusSpec,
    Indices,
    Paths,
    Split,
    check_token_ids,
    is_streamed,
    parse_paths,
    sample_offsets,
    split_tokens,
    vocabulary_problem,
    whole_parts,
)
from megatron3d.data.corpus.stream import StreamedDataset, StreamedSamples
from megatron3d.data.packing import Packing
from megatron3d.data.preprocess.encode import EncoderSpec
from megatron3d.data.preprocess.inputs import num_shards
from megatron3d.data.token_files.indexed import BLOCK, IndexedDataset
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError


@dataclass(frozen=True)
class TokenFileSamples:
    """Samples 0, 1, ... of one split, without end, epoch after epoch; shuffled unless seed is None."""

    dataset: IndexedDataset
    split: Split
    seq_length: int
    vocab_size: int
    seed: int | None

    @property
    def num_windows(self) -> int:
        """Number of distinct samples: the length of an epoch."""
        return self.split.num_windows(self.seq_length)

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a token id beyond the vocabulary."""
        offsets = sample_offsets(self.split, self.seq_length, self.seed, samples)
        tokens = self.dataset.windows(offsets, self.seq_length + 1)
        unsigned = tokens.view(f"<u{tokens.itemsize}")  # a negative id becomes a large one
        if unsigned.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(unsigned >= self.vocab_size)[0]
            wrong = int(tokens[row, column])
            found = f"token {offsets[row] + column} has id {wrong}"
            check_token_ids(self.dataset.prefix, wrong, wrong, self.vocab_size, found)
        return tokens.astype(np.int64)


@dataclass(frozen=True)
class EvaluationWindows:
    """A range as consecutive samples in which every token but the first is predicted once, or the first `most` of them.

    Sample i = tokens [i S, i S + S] of the range.  Positions behind its end hold -1: no label, and an ignored input.
    """

    dataset: IndexedDataset
    split: Split
    seq_length: int
    vocab_size: int
    most: int | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples that are not empty."""
        num_samples = -(-(self.split.num_tokens - 1) // self.seq_length)
        return min(num_samples, self.most or num_samples)

    @property
    def span(self) -> tuple[int, int]:
        """First and end of the corpus's tokens that are predicted."""
        first = self.split.first_token + 1
        return first, min(first + self.num_samples * self.seq_length, self.split.first_token + self.split.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are predicted."""
        first, last = self.span
        return last - first

    def read(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens, -1 where there is none; raises UserError beyond the vocabulary."""
        rows = np.full((len(samples), self.seq_length + 1), -1, np.int64)
        for row, sample in zip(rows, samples.tolist(), strict=True):
            first = self.split.first_token + sample * self.seq_length
            last = min(first + self.seq_length + 1, self.span[1])
            if last - first > 1:
                tokens = self.dataset.tokens(first, last)
                low, high = int(tokens.min()), int(tokens.max())
                check_token_ids(self.dataset.prefix, low, high, self.vocab_size)
                row[: len(tokens)] = tokens
        return rows

    def count_bytes(self, bytes_of_token: npt.NDArray[np.int64]) -> int:
        """Return the bytes of text that the predicted tokens stand for."""
        first, last = self.span
        blocks = (self.dataset.tokens(start, min(start + BLOCK, last)) for start in range(first, last, BLOCK))
        return sum(int(bytes_of_token[block].sum()) for block in blocks)


@dataclass(frozen=True)
class BlendedSamples:
    """Samples of one or several corpora in the order of a blend."""

    sources: tuple[TokenFileSamples, ...]
    blend: Blend

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a token id beyond the vocabulary."""
        sources, positions = self.blend.locate(samples)
        tokens = np.empty((len(samples), self.sources[0].seq_length + 1), np.int64)
        for source in np.unique(sources).tolist():
            rows = sources == source
            tokens[rows] = self.sources[source].read(positions[rows])
        return tokens

    @property
    def contents(self) -> list[list[object]]:
        """Values that identify the samples: the fingerprint and weight of each corpus."""
        return [[fingerprint(each.dataset), part] for each, part in zip(self.sources, self.blend.parts, strict=True)]

    def place(self, sample: int) -> str:
        """Return where a sample comes from, for a message."""
        sources, places = self.blend.locate(np.array([sample]))
        source = self.sources[int(sources[0])]
        (offset,) = sample_offsets(source.split, source.seq_length, source.seed, places).tolist()
        return f"{source.dataset.prefix} from token {offset}, epoch {int(places[0]) // source.num_windows}"

    def describe(self, num_samples: int, max_epochs: float) -> Iterator[str]:
        """Yield lines for the start of a run: what it will read of each corpus, with a warning for many epochs."""
        parts = self.blend.parts
        for source, part, count in zip(self.sources, parts, self.blend.counts(num_samples), strict=True):
            name, epochs = source.dataset.prefix, count / source.num_windows
            share = f"{100 * (part / sum(parts)):.4g} % " if len(parts) > 1 else ""
            yield f"{name}: {share}{count} samples to read, of {source.num_windows}: {epochs:.4g} epochs"
            if epochs > max_epochs:
                yield (
                    f"WARNING: {name} is read {epochs:.3g} times, more than data.max_epochs={max_epochs:g}; "
                    "give it less weight, add text, or train for fewer iterations"
                )

    def consumed_tokens(self, spans: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Return the metric of each corpus's tokens in spans (first sample, end, trained length); {} for one corpus."""
        return self.blend.consumed_tokens([str(source.dataset.prefix) for source in self.sources], spans)


def fingerprint(data: IndexedDataset) -> str:
    """Return sha256 of a corpus's counts, dtype, and 64 evenly spread runs of 1024 tokens."""
    digest = hashlib.sha256(f"{data.num_documents} {data.num_tokens} {data.dtype.str}".encode())
    for start in np.linspace(0, max(0, data.num_tokens - 1024), 64).astype(np.int64).tolist():
        digest.update(data.tokens(start, min(start + 1024, data.num_tokens)).tobytes())
    return digest.hexdigest()


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
        return [fault for stream in streams for fault in stream.faults]

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
        if not is_streamed(path):
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
        named = parse_paths(key, path)
        rows = [
            StreamedDataset(name, num_shards(name), spec.stream_lanes, spec.stream_shuffle_rows, seed, encoder)
            for name, _ in named
        ]
        blend = Blend(whole_parts([weight or Fraction(1) for _, weight in named]))
        return StreamedSamples(rows, spec.seq_length, blend)

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
