"""Turns text into token files for training, `{output_prefix}_{key}_document.bin` and `.idx` as Megatron writes them.

    python tools/preprocess_data.py --input data/stdlib.jsonl --output-prefix data/stdlib \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/stdlib.model --append-eod --workers 2

A document is a line of a .jsonl file, a row of a .parquet file or a dataset, or a whole .txt file.  The bytes depend
neither on the number of workers, nor on how often the tool was killed (the same command resumes), nor on the number of
tasks among which --shard i/n divides the input (tools/merge_datasets.py joins their files).
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron3d.data.option_table import HF_PREFIX, TEXT_KEY, TOKENIZER_TYPES
from megatron3d.errors import UserError, one_line
from megatron3d.runtime.arguments import MAX_NUMBER, ToolParser, add_overwrite, naming_options
from megatron3d.runtime.process import num_cores
from megatron3d.runtime.program import byte_progress, parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="preprocess_data", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help=f"files, folders, globs, or {HF_PREFIX}NAME_OR_FOLDER[@CONFIG][:SPLIT]",
    )
    add("--json-keys", nargs="+", default=[TEXT_KEY], help="keys of a line, columns of a row, that hold text")
    add("--output-prefix", type=Path, required=True, help="the token files, to which the key and the ending are added")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, default="SentencePieceTokenizer", help="of --tokenizer-model")
    add("--tokenizer-model", help="model file; none for ByteTokenizer")
    add("--append-eod", action="store_true", help="append the tokenizer's end-of-document token to every document")
    add(
        "--add-bos-token",
        action=argparse.BooleanOptionalAction,
        help="begin every document with the tokenizer's bos token; default: as the tokenizer declares",
    )
    add("--split-sentences", action="store_true", help="make every sentence a sequence of its document")
    add("--workers", type=int, default=num_cores(), help="processes; default: every core")
    add("--shard", help="i/n: process the i-th of n shards, i from 0, as one task of a SLURM array")
    add(
        "--shuffle-seed",
        type=int,
        help="shuffle files, byte ranges and row groups; default: in order",
    )
    add("--piece-mb", type=float, default=64.0, help="size of the byte ranges into which plain .jsonl files are split")
    add("--max-record-mb", type=float, default=64.0, help="longest line of JSON, or text of a row")
    add("--on-bad-record", choices=("stop", "skip"), default="stop", help="skip: leave it out, and count it")
    add_overwrite(parser)
    add("--restart", action="store_true", help="discard what an unfinished job has done")
    add("--ledger-interval", type=float, default=5.0, help="seconds of work that a kill may cost")
    add("--log-interval", type=int, default=1000, help="documents between lines where there is no terminal")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from pydantic import JsonValue

from megatron3d.data.preprocess.encode import EncoderSpec
from megatron3d.data.preprocess.inputs import (
    InputChunk,
    find_inputs,
    num_shards,
    parse_shard,
    select_shard,
    shuffle,
    split_files,
)
from megatron3d.data.preprocess.job import OnProgress, PreprocessJob, ResumePoint, run
from megatron3d.data.preprocess.readers import ReadOptions, exact_split
from megatron3d.data.tokenizers.tokenizer import build_tokenizer

MAX_FAULTS = 10


def preprocess(arguments: argparse.Namespace) -> None:
    """Encode every document, publish the token files of every key, and print what they hold."""
    job = make_job(arguments)
    if job.is_done:
        print(f"{job.stem}: this part is done already")
        return
    total = sum(chunk.num_bytes for chunk in job.chunks)
    with progress_report(total, arguments.log_interval) as on_progress:
        try:
            done = run(job, arguments.workers, arguments.ledger_interval, arguments.restart, on_progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes, or starts over where nothing was kept") from None
    for prefix, counts in zip(job.prefixes, done.written, strict=True):
        lost = (done.num_documents - counts.num_documents, "empty"), (done.num_bad, "bad")
        left_out = "".join(f", {number} {kind} ones left out" for number, kind in lost if number)
        print(f"{prefix}: {counts.num_documents} documents{left_out}, {counts.num_tokens} tokens, {job.dtype.name}")


def make_job(arguments: argparse.Namespace) -> PreprocessJob:
    """Return the job that the arguments describe; raises UserError."""
    UserError.collect(
        f"{flag} {value:g}: must be {least:g} or more, and at most {most:g}"
        for flag, value, least, most in (
            ("--workers", arguments.workers, 1, 10_000),
            ("--piece-mb", arguments.piece_mb, 1e-6, 1e6),
            ("--max-record-mb", arguments.max_record_mb, 1e-6, 1e6),
            ("--ledger-interval", arguments.ledger_interval, 0, 1e6),
            ("--log-interval", arguments.log_interval, 1, MAX_NUMBER),
        )
        if not least <= value <= most
    )
    UserError.collect(
        f"--json-keys {' '.join(arguments.json_keys)}: {key!r} is there twice; name it once"
        for number, key in enumerate(arguments.json_keys)
        if arguments.json_keys.index(key) < number
    )
    with naming_options():
        tokenizer = build_tokenizer(arguments.tokenizer_type, arguments.tokenizer_model)
    if arguments.append_eod and tokenizer.eod is None:
        raise UserError(
            f"--append-eod: {arguments.tokenizer_type} {arguments.tokenizer_model or ''} has no end-of-document token; "
            "leave --append-eod out, or use a tokenizer that has one"
        )
    begin = tokenizer.special.before_text(arguments.add_bos_token)
    if begin:
        print(f"every document begins with token {', '.join(map(str, begin))}; --no-add-bos-token leaves it out")
    shard = parse_shard(arguments.shard) if arguments.shard else None
    chunks = shuffle(find_chunks(arguments), arguments.shuffle_seed)
    keys = tuple(arguments.json_keys)
    return PreprocessJob(
        encoder=EncoderSpec(
            arguments.tokenizer_type,
            arguments.tokenizer_model,
            tokenizer.fingerprint,
            keys,
            arguments.append_eod,
            arguments.split_sentences,
            arguments.on_bad_record == "skip",
            ", or leave such out with --on-bad-record skip",
            begin,
        ),
        tokenizer=tokenizer,
        read_options=ReadOptions(keys, exact_split(tokenizer.encode), int(arguments.max_record_mb * 1e6)),
        chunks=tuple(select_shard(chunks, shard) if shard else chunks),
        output_prefix=arguments.output_prefix,
        identity=identity(arguments, tokenizer.fingerprint, chunks, (*begin, tokenizer.eod)),
        shard=shard,
        overwrite=arguments.overwrite,
    )


def find_chunks(arguments: argparse.Namespace) -> list[InputChunk]:
    """Return the chunks of the whole input, in the order of the arguments."""
    chunks: list[InputChunk] = []
    for name in arguments.input:
        if name.startswith(HF_PREFIX):
            count = num_shards(name)
            chunks += [InputChunk("dataset", name, number, count, 0) for number in range(count)]
        else:
            files = find_inputs([name])
            empty = [str(file) for file in files if not file.stat().st_size]
            if empty:
                print(f"WARNING: --input: {len(empty)} empty files, such as {empty[0]}", file=sys.stderr)
            chunks += split_files(files, max(1, int(arguments.piece_mb * 2**20)))
    return chunks


def identity(
    arguments: argparse.Namespace, fingerprint: str, chunks: Sequence[InputChunk], added: Sequence[int | None]
) -> dict[str, JsonValue]:
    """Return the values that determine the bytes, by which a command recognizes an unfinished job as its own.

    Args:
        added: tokens before every document, and the one after it if --append-eod is given.
    """
    files = sorted({chunk.path for chunk in chunks if chunk.kind != "dataset"})
    return {
        "--input": hashlib.sha256("\n".join(chunk.identity for chunk in chunks).encode()).hexdigest(),
        "content of --input": hashlib.sha256("\n".join(map(stamp, files)).encode(errors="surrogateescape")).hexdigest(),
        "--tokenizer-model": fingerprint,
        "--json-keys": list(arguments.json_keys),
        "--append-eod": arguments.append_eod,
        "tokens before and after a document": list(added),
        "--split-sentences": arguments.split_sentences,
        "--max-record-mb": arguments.max_record_mb,
    }


def stamp(path: str) -> str:
    """Return a text that changes with a file."""
    status = Path(path).stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


@contextmanager
def progress_report(num_bytes: int, log_interval: int) -> Iterator[OnProgress]:
    """Yield a callback that updates a bar on a terminal, and elsewhere prints a line every `log_interval` documents."""
    began, first = time.monotonic(), None
    num_reports = num_faults = 0
    with byte_progress("{task.fields[speed]}") as progress:
        task = progress.add_task("encoding", total=num_bytes or None, speed="")

        def on_progress(point: ResumePoint, faults: tuple[str, ...]) -> None:
            nonlocal first, num_reports, num_faults
            for fault in faults[: max(0, MAX_FAULTS - num_faults)]:
                progress.console.print(one_line(f"left out: {fault}"), soft_wrap=True, markup=False, highlight=False)
                num_faults += 1
            tokens = sum(written.num_tokens for written in point.written)
            first = (tokens, point.num_bytes) if first is None else first
            seconds = max(time.monotonic() - began, 1e-9)
            speed = f"{(tokens - first[0]) / seconds:,.0f} tokens/s"
            progress.update(task, completed=point.num_bytes, speed=speed)
            if not progress.console.is_terminal and point.num_documents // log_interval > num_reports:
                num_reports = point.num_documents // log_interval
                rate = (point.num_bytes - first[1]) / 1e6 / seconds
                left = (num_bytes - point.num_bytes) / 1e6 / max(rate, 1e-9)
                print(
                    f"{point.num_documents} documents ({point.num_bad} left out), {point.num_bytes / 1e6:.1f} of "
                    f"{num_bytes / 1e6:.1f} MB, {rate:.1f} MB/s, {speed}, {max(left, 0):.0f} s left",
                    flush=True,
                )

        yield on_progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(preprocess, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
