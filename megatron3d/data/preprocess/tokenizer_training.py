"""Tokenizer models learnt from text: SentencePiece pieces, byte-level BPE of Hugging Face, or characters that occur.

The SentencePiece model keeps every character: no normalisation, no added space, bytes for rare characters, spaces and
newlines inside pieces, so that indented source code survives encoding and decoding.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import tokenizers

from megatron3d.data.preprocess.input_chunks import split_files
from megatron3d.data.preprocess.readers import ReadOptions, read_pieces
from megatron3d.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
CHUNK = 4096
"""Characters that SentencePiece sees at one time; by itself it skips long sentences, whole documents even more so."""


@dataclass(frozen=True)
class TrainingText:
    """Files to learn from, and the part of their text to use."""

    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    fraction: float = 1.0

    def chunks(self) -> Iterator[str]:
        """Evenly spread pieces of the text, cut after a newline where there is one."""
        seen = taken = 0
        for text in self._texts():
            for chunk in _cut(text):
                if taken <= self.fraction * seen:
                    taken += len(chunk)
                    yield chunk
                seen += len(chunk)

    def empty(self) -> UserError:
        """What is wrong with a source without text."""
        return UserError(f"--input {' '.join(map(str, self.paths))}: no text under {', '.join(map(repr, self.keys))}")

    def _texts(self) -> Iterator[str]:
        for record in read_pieces(split_files(self.paths), ReadOptions(self.keys)):
            yield from record.texts(self.keys)


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + CHUNK
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def train_sentencepiece(source: TrainingText, model_type: str, vocab_size: int) -> bytes:
    """A SentencePiece model of `bpe` or `unigram` pieces; raises UserError if the text cannot fill the vocabulary."""
    model = io.BytesIO()
    chunks = list(source.chunks())  # before training, which reports a bad document as an error of its own
    if not chunks:
        raise source.empty()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            max_sentence_length=4 * CHUNK,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_DOCUMENT,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        why = str(error).rpartition("] ")[2] or str(error)  # which may be a condition of the library alone
        raise UserError(f"--vocab-size {vocab_size}: {why.strip()}; use another number, or other text") from error
    return model.getvalue()


def train_byte_level(source: TrainingText, vocab_size: int) -> bytes:
    """A tokenizer.json of byte-level BPE as GPT-2's: any text survives; raises UserError where there is no text."""
    chunks = list(source.chunks())
    if not chunks:
        raise source.empty()
    least = len(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise UserError(f"--vocab-size {vocab_size}: the bytes and the end of a document are {least}; use more")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(chunks, trainer)
    if library.get_vocab_size() < vocab_size:
        found = library.get_vocab_size()
        raise UserError(f"--vocab-size {vocab_size}: the text gives {found} tokens; use at most {found}, or more text")
    return library.to_str(pretty=True).encode()


def collect_characters(source: TrainingText) -> bytes:
    """The JSON list of the characters that occur, sorted."""
    characters: set[str] = set()
    for chunk in source.chunks():
        characters.update(chunk)
    if not characters:
        raise source.empty()
    return (json.dumps(sorted(characters), ensure_ascii=False) + "\n").encode()


def select(paths: Sequence[Path], keys: Sequence[str], max_bytes: float | None) -> TrainingText:
    """About `max_bytes` of the files, or all of them."""
    num_bytes = sum(path.stat().st_size for path in paths)
    fraction = 1.0 if max_bytes is None else min(1.0, max_bytes / max(1, num_bytes))
    return TrainingText(tuple(paths), tuple(keys), fraction)
