"""Token files, the log of preprocessing, and the model files of tokenizers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron3d.data.preprocess.job import ResumeLog, ResumePoint
from megatron3d.data.preprocess.tokenizer_training import (
    TrainingText,
    collect_characters,
    train_byte_level,
    train_sentencepiece,
)
from megatron3d.data.token_files.indexed import HEADER, IndexedDataset, token_dtype
from megatron3d.data.token_files.writer import IndexedWriter, WrittenCounts
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, build_tokenizer
from megatron3d.errors import UserError
from tests.fuzz.runner import Target

TEXT = "def f(x):\n    return x + 1  # übung ▁ 你好 \U0001f600\n" * 20 + "".join(map(chr, range(32, 127)))
SAMPLES = ("", " ", "def f(x):\n\treturn 1", "你好 \U0001f600 ▁", "<|endoftext|>", "a" * 300, "\0\x1b")


def write_tokens(folder: Path) -> None:
    """Write documents of one to three sequences, with a manifest."""
    tokenizer = ByteTokenizer(None)
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(folder / "corpus", dtype) as writer:
        for text in ("first", "the second document", "", "last"):
            ids = [*tokenizer.encode(text), 256]
            writer.add(np.array(ids, dtype), np.array([1, len(ids) - 1]), np.array([1, 2], np.int8))
        writer.finish(tokenizer)


def read_tokens(folder: Path) -> object:
    """Verify the files as the tools do, and read every document, its length, and windows."""
    data = IndexedDataset(folder / "corpus")
    data.verify()
    documents = [[part.tolist() for part in data.sequences(number)] for number in range(data.num_documents)]
    lengths = [int(length) for block in data.document_lengths() for length in block]
    window = min(4, data.num_tokens)
    first = data.windows(np.array([0, data.num_tokens - window]), window).tolist()
    return documents, lengths, first


def read_foreign_tokens(folder: Path) -> object:
    """Read token files that have no manifest, as those that Megatron wrote."""
    (folder / "corpus.manifest.json").unlink(missing_ok=True)
    return read_tokens(folder)


JOB = {"input": "abc", "shard": [0, 1]}


def write_log(folder: Path) -> None:
    """Write the log of a job with several points."""
    log = ResumeLog(folder / "log.jsonl", JOB)
    for number in range(1, 5):
        counts = WrittenCounts(1000 * number, 10 * number, 5 * number, 3, 255)
        log.write(ResumePoint(number, 7 * number, 5 * number, 9999 * number, 1, number == 4, (counts, counts)))
    log.close()


def read_log(folder: Path) -> object:
    """Open the log as a job that resumes does."""
    log = ResumeLog(folder / "log.jsonl", JOB)
    log.close()
    return log.points


def is_start(original: object, found: object) -> bool:
    """Return whether the points found are the first of the original's; the others are done again."""
    assert isinstance(original, list) and isinstance(found, list), "lists of points"
    return found == original[: len(found)]


def use_tokenizer(tokenizer_type: str, file: str) -> Callable[[Path], object]:
    """Return a reader that builds a tokenizer and uses it in every way."""

    def read(folder: Path) -> object:
        tokenizer = build_tokenizer(tokenizer_type, str(folder / file))
        encoded = []
        for text in SAMPLES:
            try:
                ids = tokenizer.encode(text)
            except UserError:
                continue
            assert all(0 <= token < tokenizer.vocab_size for token in ids), f"{ids} of {tokenizer.vocab_size}"
            encoded.append((ids, tokenizer.decode(ids)))
        tokenizer.decode(range(min(tokenizer.vocab_size, 300)))
        assert tokenizer.eod is None or 0 <= tokenizer.eod < tokenizer.vocab_size, f"eod {tokenizer.eod}"
        counts = tokenizer.token_bytes()
        assert counts is None or (counts.shape == (tokenizer.vocab_size,) and counts.min() >= 0), "bytes of tokens"
        return encoded

    return read


def _text(folder: Path) -> TrainingText:
    (folder / "text.txt").write_text(TEXT)
    return TrainingText((folder / "text.txt",), ("text",))


def write_sentencepiece(folder: Path) -> None:
    """Train a small SentencePiece model."""
    (folder / "spm.model").write_bytes(train_sentencepiece(_text(folder), "bpe", 400))


def write_unigram(folder: Path) -> None:
    """Train a small SentencePiece model of pieces with scores."""
    (folder / "spm.model").write_bytes(train_sentencepiece(_text(folder), "unigram", 360))


def write_byte_level(folder: Path) -> None:
    """Train a small tokenizer.json."""
    (folder / "tokenizer.json").write_bytes(train_byte_level(_text(folder), 270))


def write_pieces(folder: Path) -> None:
    """Write a tokenizer.json of Unigram pieces with byte fallback, as converted SentencePiece models have."""
    pieces = [
        ["<unk>", 0.0],
        ["</s>", 0.0],
        *([f"<0x{byte:02X}>", -9.0] for byte in range(256)),
        ["▁", -2.0],
        ["de", -1.5],
    ]
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": "<unk>", **special}, {"id": 1, "content": "</s>", **special}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))


def write_tiktoken(folder: Path) -> None:
    """Write ranks of all bytes and a few merges, and the file that names them."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"de", b"def", b"  "]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "small.tiktoken").write_bytes(b"".join(lines))
    special = {"<|endoftext|>": 259, "<|pad|>": 262}
    values = {"ranks": "small.tiktoken", "pattern": "\\w+|[^\\w\\s]+|\\s+", "special_tokens": special}
    (folder / "small.json").write_text(json.dumps(values))


def write_characters(folder: Path) -> None:
    """Write the characters of a text."""
    (folder / "characters.json").write_bytes(collect_characters(_text(folder)))


def equal(original: object, found: object) -> bool:
    """Return whether the data are those of the original."""
    return original == found


WORDS = (HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2, 2), b"MMIDIDX\0\0", b"\1\0\0\0", b"bin_sha256", b'"part": "1/2"')
LOG_WORDS = (b'"written":', b'"piece":', b'"is_done": true', b'"num_documents":', b"}\n{", b'"shard":', b"[]")
VOCABULARY = (
    b'"unk_id":',
    b'"<unk>"',
    b'"type":',
    b'"BPE"',
    b'"Unigram"',
    b'"ByteLevel"',
    b'"Regex":',
    b"(a+)+$",
    b"\\p{L}",
)
TARGETS = (
    Target("token_files", write_tokens, read_tokens, WORDS, accepts=equal),
    Target("megatron_files", write_tokens, read_foreign_tokens, WORDS, ("corpus.idx", "corpus.bin")),
    Target("ledger", write_log, read_log, LOG_WORDS, accepts=is_start),
    Target(
        "sentencepiece", write_sentencepiece, use_tokenizer("SentencePieceTokenizer", "spm.model"), (), ("spm.model",)
    ),
    Target("unigram", write_unigram, use_tokenizer("SentencePieceTokenizer", "spm.model"), (), ("spm.model",)),
    Target(
        "tokenizer_json",
        write_byte_level,
        use_tokenizer("HuggingFaceTokenizer", "tokenizer.json"),
        VOCABULARY,
        ("tokenizer.json",),
    ),
    Target(
        "tokenizer_pieces",
        write_pieces,
        use_tokenizer("HuggingFaceTokenizer", "tokenizer.json"),
        VOCABULARY,
        ("tokenizer.json",),
    ),
    Target("tiktoken", write_tiktoken, use_tokenizer("TikTokenizer", "small.json"), VOCABULARY),
    Target("characters", write_characters, use_tokenizer("CharTokenizer", "characters.json"), (), ("characters.json",)),
)
