"""Turns text into token files for training, `{output_prefix}_{key}_document.bin` and `.idx` as Megatron writes them.

    python tools/preprocess_data.py --input data/stdlib.jsonl --output-prefix data/stdlib \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/stdlib.model --append-eod --workers 2

A line of a .jsonl file is a document, and so is a whole .txt file.  The bytes do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from megatron3d.cli import byte_progress, run_tool
from megatron3d.data.documents import TEXT_KEY, find_inputs, read_records
from megatron3d.data.encode import Encoded, Encoder, encode
from megatron3d.data.files import with_suffix
from megatron3d.data.indexed import IndexedWriter, token_dtype
from megatron3d.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron3d.errors import UserError


def preprocess(arguments: argparse.Namespace) -> None:
    """Encode every document, publish the token files of every key, and say what they hold."""
    tokenizer = build_tokenizer(arguments.tokenizer_type, arguments.tokenizer_model)
    if arguments.append_eod and tokenizer.eod is None:
        raise UserError(
            f"--append-eod: {arguments.tokenizer_type} {arguments.tokenizer_model or ''} has no end-of-document token; "
            "leave --append-eod out, or use a tokenizer that has one"
        )
    if arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: must be 1 or more")
    paths = find_inputs(arguments.input)
    keys = tuple(arguments.json_keys)
    encoder = Encoder(
        arguments.tokenizer_type, arguments.tokenizer_model, tokenizer.fingerprint, keys, arguments.append_eod
    )
    prefixes = [with_suffix(arguments.output_prefix, f"_{key}_document") for key in keys]
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        batches = stack.enter_context(closing(encode(encoder, read_records(paths), arguments.workers)))
        num_bytes = sum(path.stat().st_size for path in paths)
        for batch in reported(batches, num_bytes, arguments.log_interval):
            for writer, (tokens, lengths) in zip(writers, batch.columns, strict=True):
                writer.add(tokens, lengths)
        UserError.collect(
            f"--input {' '.join(arguments.input)}: no text under the key {key!r}"
            for key, writer in zip(keys, writers, strict=True)
            if not writer.num_documents
        )
        for prefix, writer in zip(prefixes, writers, strict=True):
            writer.finish(tokenizer)
            print(f"{prefix}: {writer.num_documents} documents, {writer.num_tokens} tokens, {dtype.name}")


def reported(batches: Iterator[Encoded], num_bytes: int, log_interval: int) -> Iterator[Encoded]:
    """The same batches; a bar on a terminal, elsewhere a line every `log_interval` documents."""
    began, documents, done_bytes, reports = time.monotonic(), 0, 0, 0
    with byte_progress() as progress:
        task = progress.add_task("encoding", total=num_bytes)
        for batch in batches:
            yield batch
            documents, done_bytes = documents + batch.num_documents, done_bytes + batch.num_bytes
            progress.update(task, completed=done_bytes)
            if not progress.console.is_terminal and documents // log_interval > reports:
                reports = documents // log_interval
                speed = done_bytes / 1e6 / (time.monotonic() - began)
                print(f"{documents} documents, {done_bytes / 1e6:.1f} of {num_bytes / 1e6:.1f} MB, {speed:.1f} MB/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the tool."""
    parser = argparse.ArgumentParser(prog="preprocess_data", description=__doc__.partition("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, help="files or globs, .jsonl or .txt")
    parser.add_argument("--json-keys", nargs="+", default=[TEXT_KEY], help="keys of a .jsonl line that hold text")
    parser.add_argument("--output-prefix", type=Path, required=True)
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="SentencePieceTokenizer")
    parser.add_argument("--tokenizer-model", help="model file; none for ByteTokenizer")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: every core")
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the tokenizer's token for it"
    )
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents between lines where there is no terminal"
    )
    return run_tool(preprocess, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
