"""Preprocessing throughput: text to token files in MB/s and tokens/s, compared with the bare tokenizer library and
megatron-core's builder.

python benchmarks/preprocess.py --output benchmarks/results/preprocess.json
python benchmarks/preprocess.py --quick

The text is the standard library's sources, one document per file, encoded with a SentencePiece and a Hugging Face
tokenizer of 8192 tokens trained on it.  The bare loop calls the library on texts in memory and discards the ids: an
upper bound.  megatron-core's builder (where installed) is fed by the same tokenizer in a loop.  Workers are timed as
commands, on several copies of the text, with the start of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import sentencepiece
import tokenizers
import torch
from common.report import Row, Turns, interleaved, show, write

from megatron3d.data.token_files.indexed import IndexedDataset
from tools import make_corpus, preprocess_data, train_tokenizer

KINDS = {
    "SentencePiece": ("SentencePieceTokenizer", "spm.model"),
    "Hugging Face": ("HuggingFaceTokenizer", "hf.tokenizer.json"),
}
MEASURE = """
import pathlib, resource, sys
from tools import preprocess_data
code = preprocess_data.main(sys.argv[1:])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print("peak", code, own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure throughput with each tokenizer, then memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=16, help="MB of text to encode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=3, help="copies of the text that workers encode")
    parser.add_argument("--memory-mb", type=float, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--record-mb", type=float, default=200, help="size of a single record")
    parser.add_argument("--memory-tokenizer", choices=KINDS, default="SentencePiece")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.mb, args.rounds = 1, 1
        args.copies, args.memory_mb = 1, [0.5]
        args.record_mb = 0.5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = prepare(folder, args.mb)
        rows = [row for kind in KINDS for row in speed(folder, source, kind, args.rounds)]
        show(f"{source.stat().st_size / 1e6:.1f} MB of JSON lines to token files", rows)
        kinds = [*KINDS][: 1 if args.quick else None]
        workers = [row for kind in kinds for row in scaling(folder, source, kind, args.copies, args.rounds)]
        show("the command, with workers", workers)
        large = inputs(folder, source, args.memory_mb, args.record_mb)
        memory = [peak(folder, what, path, args.memory_tokenizer) for what, path in large]
        show("peak memory with two workers", memory)
    if args.output:
        write(args.output, rows, workers=workers, memory=memory)
    return 0


def prepare(folder: Path, megabytes: float) -> Path:
    """Write a corpus, and train a tokenizer of each kind."""
    source = folder / "text.jsonl"
    quietly(lambda: make_corpus.main(["--output", str(source), "--max-mb", str(megabytes)]))
    words = ["--input", str(source), "--vocab-size", "8192", "--max-mb", "4", "--output-prefix"]
    quietly(lambda: train_tokenizer.main([*words, str(folder / "spm"), "--type", "bpe"]))
    quietly(lambda: train_tokenizer.main([*words, str(folder / "hf"), "--type", "byte-bpe"]))
    return source


def speed(folder: Path, source: Path, kind: str, rounds: int) -> Iterator[Row]:
    """Measure all contestants, interleaved, with one tokenizer."""
    steps = contestants(folder, source, kind)
    turns = interleaved(steps, rounds, warmup=1)
    num_bytes = source.stat().st_size
    num_tokens = IndexedDataset(folder / "ours_text_document").num_tokens
    for name in steps:
        wall = statistics.median(turn.wall_s for turn in turns[name])
        cpu = statistics.median(turn.cpu_s for turn in turns[name])
        yield {
            "tokenizer": kind,
            "what": name,
            "MB/s": num_bytes / 1e6 / wall,
            "tokens/s": num_tokens / wall,
            "MB/s per core": num_bytes / 1e6 / cpu,
            "tokens/s per core": num_tokens / cpu,
            "over bare loop": times(turns, "bare loop", name, "cpu_s"),
        }


def scaling(folder: Path, source: Path, kind: str, copies: int, rounds: int) -> Iterator[Row]:
    """Measure one and two workers, interleaved, in processes whose main program is the tool: workers import it."""
    tokenizer_type, file = KINDS[kind]
    large = folder / "copies.jsonl"
    large.write_bytes(source.read_bytes() * copies)
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(large), "--output-prefix", str(folder / "c")]
    command += ["--tokenizer-type", tokenizer_type, "--tokenizer-model", str(folder / file), "--append-eod"]

    def done(workers: str) -> Callable[[], object]:
        return lambda: subprocess.run([*command, "--overwrite", "--workers", workers], capture_output=True, check=True)

    turns = interleaved({workers: done(workers) for workers in ("1", "2")}, rounds, warmup=1)
    for workers, each in turns.items():
        speed = large.stat().st_size / 1e6 / statistics.median(turn.wall_s for turn in each)
        over = times(turns, "1", workers, "wall_s")
        yield {"tokenizer": kind, "workers": workers, "MB/s": speed, "over 1 worker": over}
    large.unlink()


def times(turns: Turns, base: str, name: str, clock: str) -> float:
    """Return the speed-up: the median over rounds of the baseline's time / this one's time in the same round."""
    pairs = zip(turns[base], turns[name], strict=True)
    return statistics.median(getattr(one, clock) / getattr(other, clock) for one, other in pairs)  # type: ignore[no-any-return]


def contestants(folder: Path, source: Path, kind: str) -> Mapping[str, Callable[[], object]]:
    """Return functions by name that encode the same texts."""
    tokenizer_type, file = KINDS[kind]
    model, encode = str(folder / file), library(kind, str(folder / file))
    texts = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]

    def bare() -> None:
        for text in texts:
            encode(text)

    def ours() -> None:
        words = ["--input", str(source), "--output-prefix", str(folder / "ours"), "--workers", "1", "--overwrite"]
        words += ["--tokenizer-type", tokenizer_type, "--tokenizer-model", model, "--append-eod"]
        quietly(lambda: preprocess_data.main(words))

    found = {"bare loop": bare, "ours, 1 worker": ours}
    theirs = builder()
    return found | ({"megatron-core builder": lambda: build(theirs, folder, source, encode)} if theirs else {})


def library(kind: str, model: str) -> Callable[[str], list[int]]:
    """Return the tokenizer library's own encode function."""
    if kind == "SentencePiece":
        processor = sentencepiece.SentencePieceProcessor(model_file=model)
        return lambda text: processor.encode(text)
    made = tokenizers.Tokenizer.from_file(model)
    return lambda text: made.encode(text, add_special_tokens=False).ids


def builder() -> Any:
    """Return megatron-core's class; None where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        except ImportError:
            print("megatron-core is not installed, and is left out")
            return None
    return IndexedDatasetBuilder


def build(theirs: Any, folder: Path, source: Path, encode: Callable[[str], list[int]]) -> None:
    """Build as its preprocessing loop does: a line, its ids, an item, the end of a document."""
    made = theirs(str(folder / "theirs.bin"), dtype=np.uint16)
    with source.open(encoding="utf-8") as lines:
        for line in lines:
            made.add_item(torch.IntTensor([*encode(json.loads(line)["text"]), 1]))
            made.end_document()
    made.finalize(str(folder / "theirs.idx"))


def inputs(folder: Path, source: Path, sizes: Sequence[float], record_mb: float) -> Iterator[tuple[str, Path]]:
    """Yield files whose peak memory is measured: the text repeated, then the same as a single record."""
    for megabytes in sizes:
        large = folder / "large.jsonl"
        with large.open("wb") as file:
            lines = itertools.cycle(source.read_bytes().splitlines(keepends=True))
            while file.tell() < megabytes * 1e6:
                file.write(next(lines))
        yield f"{megabytes:g} MB of lines", large
        large.unlink()
    texts = "".join(json.loads(line)["text"] for line in source.read_bytes().splitlines())
    text = (texts * (int(record_mb * 1e6) // len(texts) + 1))[: int(record_mb * 1e6)]
    single = folder / "single.jsonl"
    single.write_text(json.dumps({"text": text}) + "\n")
    yield f"one line of {record_mb:g} MB", single
    cell = folder / "single.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), cell)
    yield f"one row of {record_mb:g} MB", cell


def peak(folder: Path, what: str, path: Path, kind: str) -> Row:
    """Return the peak resident memory of the tool with two workers, in processes of its own."""
    tokenizer_type, model = KINDS[kind]
    words = ["--input", str(path), "--output-prefix", str(folder / "large"), "--workers", "2", "--append-eod"]
    words += ["--tokenizer-type", tokenizer_type, "--tokenizer-model", str(folder / model), "--max-record-mb", "1000"]
    words += ["--overwrite"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True)
    _, code, own, child = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    return {"input": what, "main MB": float(own), "largest worker MB": float(child)}


def quietly(work: Callable[[], int]) -> None:
    """Run a tool without its output; it must succeed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = work()
    assert code == 0, errors.getvalue()


if __name__ == "__main__":
    sys.exit(main())
