"""Learns a tokenizer from text: SentencePiece pieces (bpe, unigram), or the list of characters (char).

    python tools/train_tokenizer.py --input data/stdlib.jsonl --vocab-size 4096 --output-prefix data/stdlib

writes data/stdlib.model for SentencePieceTokenizer; with --type char, data/stdlib.json for CharTokenizer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from megatron3d.cli import run_tool, waiting
from megatron3d.data.documents import TEXT_KEY
from megatron3d.data.files import replacing, with_suffix
from megatron3d.data.pieces import find_inputs
from megatron3d.data.tokenizer import build_tokenizer
from megatron3d.data.vocabulary import Source, collect_characters, select, train_sentencepiece
from megatron3d.errors import UserError


def in_child(source: Source, model_type: str, vocab_size: int) -> bytes:
    """Train in a process of its own: the library neither lets a spinner turn nor listens to Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        return pool.submit(train_sentencepiece, source, model_type, vocab_size).result()


def train_tokenizer(arguments: argparse.Namespace) -> None:
    """Learn the model, write it, and say what it is."""
    characters = arguments.type == "char"
    if characters and arguments.vocab_size is not None:
        raise UserError(f"--vocab-size {arguments.vocab_size}: --type char takes every character; remove --vocab-size")
    if not characters and arguments.vocab_size is None:
        raise UserError(f"--vocab-size: --type {arguments.type} needs one; use e.g. --vocab-size 4096")
    paths = find_inputs(arguments.input)
    output = with_suffix(arguments.output_prefix, ".json" if characters else ".model")
    source = select(paths, arguments.json_keys, None if characters else arguments.max_mb * 1e6)
    began = time.monotonic()
    with replacing(output) as file, waiting(f"learning {arguments.type} from {len(paths)} files"):
        if characters:
            file.write(collect_characters(source))
        else:
            file.write(in_child(source, arguments.type, arguments.vocab_size))
    tokenizer_type = "CharTokenizer" if characters else "SentencePieceTokenizer"
    vocab_size = build_tokenizer(tokenizer_type, str(output)).vocab_size
    print(f"{output}: {tokenizer_type} of {vocab_size} tokens, learnt in {time.monotonic() - began:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the tool."""
    parser = argparse.ArgumentParser(prog="train_tokenizer", description=__doc__.partition("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, help="files or globs, .jsonl or .txt")
    parser.add_argument("--json-keys", nargs="+", default=[TEXT_KEY], help="keys of a .jsonl line that hold text")
    parser.add_argument("--output-prefix", "--model-prefix", type=Path, required=True, help="the model without suffix")
    parser.add_argument("--type", choices=("bpe", "unigram", "char"), default="bpe")
    parser.add_argument("--vocab-size", type=int, help="number of tokens, with the end of a document and the bytes")
    parser.add_argument("--max-mb", type=float, default=20.0, help="learn from so much, evenly spread; char reads all")
    return run_tool(train_tokenizer, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
