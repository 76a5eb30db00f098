"""Train tokenizer models on text: SentencePiece pieces, byte-level BPE of Hugging Face, or the characters that occur.

The SentencePiece model keeps every character: no normalisation, no added space, bytes for rare characters, spaces and
newlines inside pieces, so that indented source code survives encoding and decoding.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import tokenizers

from megatron3d.data.preprocess.inputs import split_files
from megatron3d.data.preprocess.readers import ReadOptions, read_chunk
from megatron3d.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
MAX_SNIPPET = 4096
"""Characters of the snippets that SentencePiece trains on; by default it skips long sentences and whole documents."""


@dataclass(frozen=True)
class TrainingText:
    """Files, and the fraction of their text to train on."""

    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    fraction: float = 1.0

    def snippets(self) -> Iterator[str]:
        """Yield evenly spread snippets of the text, which end after a newline where there is one; raises UserError."""
        seen = taken = 0
        chunks, options = split_files(self.paths), ReadOptions(self.keys)
        texts = (text for chunk in chunks for record in read_chunk(chunk, options) for text in record.texts(self.keys))
        for snippet in (snippet for text in texts for snippet in _snippets(text)):
            if taken <= self.fraction * seen:
                taken += len(snippet)
                yield snippet
            seen += len(snippet)
        if not seen:
            keys = ", ".join(map(repr, self.keys))
            raise UserError(f"--input {' '.join(map(str, self.paths))}: no text under {keys}")


def _snippets(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + MAX_SNIPPET
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def train_sentencepiece(text: TrainingText, model_type: str, vocab_size: int) -> bytes:
    """Train a SentencePiece model, `bpe` or `unigram`; raises UserError if the text cannot fill the vocabulary."""
    model = io.BytesIO()
    snippets = list(text.snippets())  # read before training, which would hide the error of a bad document
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(snippets),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            max_sentence_length=4 * MAX_SNIPPET,
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
    except (RuntimeError, ValueError) as error:
        why = str(error).rpartition("] ")[2] or str(error)  # the message may be only the library's failed condition
        raise UserError(f"--vocab-size {vocab_size}: {why.strip()}; use another number, or other text") from error
    return model.getvalue()


def train_byte_level(text: TrainingText, vocab_size: int) -> bytes:
    """Train a tokenizer.json of byte-level BPE, as GPT-2's; raises UserError where the text gives too few tokens."""
    snippets = list(text.snippets())  # before training, as above
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
    library.train_from_iterator(snippets, trainer)
    if library.get_vocab_size() < vocab_size:
        found = library.get_vocab_size()
        raise UserError(f"--vocab-size {vocab_size}: the text gives {found} tokens; use at most {found}, or more text")
    return library.to_str(pretty=True).encode()


def collect_characters(text: TrainingText) -> bytes:
    """Return the JSON list of the characters that occur, sorted; raises UserError where there are none."""
    characters = {character for snippet in text.snippets() for character in snippet}
    return (json.dumps(sorted(characters), ensure_ascii=False) + "\n").encode()
