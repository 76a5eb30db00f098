"""Trains a tokenizer on text: SentencePiece pieces, byte-level BPE of Hugging Face, or the list of characters.

python tools/train_tokenizer.py --input data/stdlib.jsonl --vocab-size 4096 --output-prefix data/stdlib

--type bpe, unigram   data/stdlib.model            for SentencePieceTokenizer
--type byte-bpe       data/stdlib.tokenizer.json   for HuggingFaceTokenizer
--type char           data/stdlib.json             for CharTokenizer
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from megatron3d.data.option_table import TEXT_KEY
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, add_overwrite, real, require_free, whole
from megatron3d.runtime.program import parse_first, run_tool, spinner

# By --type, the tokenizer that reads the model and the suffix of its file.
OUTPUTS = {
    "bpe": ("SentencePieceTokenizer", ".model"),
    "unigram": ("SentencePieceTokenizer", ".model"),
    "byte-bpe": ("HuggingFaceTokenizer", ".tokenizer.json"),
    "char": ("CharTokenizer", ".json"),
}


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="train_tokenizer", description=__doc__.partition("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument("--json-keys", nargs="+", default=[TEXT_KEY], help="keys of a .jsonl line that hold text")
    parser.add_argument("--output-prefix", "--model-prefix", type=Path, required=True, help="the model without suffix")
    parser.add_argument("--type", choices=OUTPUTS, default="bpe", help="of the tokenizer")
    parser.add_argument(
        "--vocab-size", type=whole(1, 10**8), help="number of tokens, with the end of a document and the bytes"
    )
    parser.add_argument("--max-mb", type=real(), default=20.0, help="train on this much, evenly spread; char reads all")
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.data.preprocess.inputs import find_inputs
from megatron3d.data.preprocess.tokenizer_training import (
    TrainingText,
    collect_characters,
    train_byte_level,
    train_sentencepiece,
)
from megatron3d.data.token_files.files import replace_output, with_suffix
from megatron3d.data.tokenizers.tokenizer import MAX_VOCAB_SIZE, build_tokenizer


def train(text: TrainingText, kind: str, vocab_size: int) -> bytes:
    """Return the trained model of a --type."""
    if kind == "char":
        return collect_characters(text)
    return train_byte_level(text, vocab_size) if kind == "byte-bpe" else train_sentencepiece(text, kind, vocab_size)


def train_in_child(text: TrainingText, kind: str, vocab_size: int) -> bytes:
    """Train in a child process: the libraries block the progress display and Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
            return pool.submit(train, text, kind, vocab_size).result()
    except BrokenProcessPool as error:
        raise UserError(
            f"--vocab-size {vocab_size}: the training process was killed, by the system where memory ran out; use a "
            "smaller one, or a smaller --max-mb"
        ) from error


def train_tokenizer(arguments: argparse.Namespace) -> None:
    """Train the model, write it, and print what it is."""
    characters = arguments.type == "char"
    if characters and arguments.vocab_size is not None:
        raise UserError(f"--vocab-size {arguments.vocab_size}: --type char takes every character; remove --vocab-size")
    if not characters and not 1 <= (arguments.vocab_size or 0) <= MAX_VOCAB_SIZE:
        limits = f"needs one of 1 to {MAX_VOCAB_SIZE}; use e.g. --vocab-size 4096"
        raise UserError(f"--vocab-size {arguments.vocab_size}: --type {arguments.type} {limits}")
    if not arguments.max_mb > 0:
        raise UserError(f"--max-mb {arguments.max_mb:g}: must be above 0; use for example 20")
    paths = find_inputs(arguments.input)
    tokenizer_type, suffix = OUTPUTS[arguments.type]
    output = with_suffix(arguments.output_prefix, suffix)
    require_free("--output-prefix", [output], paths, arguments.overwrite)
    num_bytes = sum(path.stat().st_size for path in paths)
    fraction = 1.0 if characters else min(1.0, arguments.max_mb * 1e6 / max(1, num_bytes))
    text = TrainingText(tuple(paths), tuple(arguments.json_keys), fraction)
    began = time.monotonic()
    with replace_output(output) as file, spinner(f"learning {arguments.type} from {len(paths)} files"):
        file.write(train(text, "char", 0) if characters else train_in_child(text, arguments.type, arguments.vocab_size))
    vocab_size = build_tokenizer(tokenizer_type, str(output)).vocab_size
    print(f"{output}: {tokenizer_type} of {vocab_size} tokens, learnt in {time.monotonic() - began:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(train_tokenizer, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
