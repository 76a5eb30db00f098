"""Token files to samples: time to the first one for any size of corpus, samples/s, and the share of a training step.

python benchmarks/data_loading.py --output benchmarks/results/data_loading.json
python benchmarks/data_loading.py --quick

Corpora of 10^6, 10^9 and 10^12 tokens are opened and read by processes of their own; the large .bin files are sparse,
the indexes whole: 10^8 documents in the largest.  Samples/s are compared with a bare memmap read of as many random
windows and, if it is installed, megatron-core's GPTDataset, which builds its index first.  The step is that of the
quickstart's model, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.report import Row, interleaved, show, times_faster, write

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.corpus.corpus import TokenFileSamples
from megatron3d.data.corpus.plan import Split
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.token_files.indexed import HEADER, MAGIC, IndexedDataset
from megatron3d.train.state import build_state, connect
from megatron3d.train.step import StepSettings, train_step

VOCAB_SIZE, SEQ_LENGTH = 4096, 1024
BATCH = 32
BLOCK = 1 << 22
FIRST = """
import sys, time
import numpy as np
from megatron3d.data.corpus.corpus import TokenFileSamples
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.corpus.plan import Split
prefix, length, batch, vocab_size = sys.argv[1], *map(int, sys.argv[2:])
begin = time.perf_counter()
data = IndexedDataset(prefix)
TokenFileSamples(data, Split(0, data.num_tokens), length, vocab_size, 1).read(np.arange(batch))
print(time.perf_counter() - begin)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the time to the first sample, samples/s, and the share of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, nargs="*", default=[1e6, 1e9, 1e12])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of the quickstart's model")
    parser.add_argument("--folder", type=Path, help="folder for gigabytes of corpora; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.rounds = [1e6, 1e8], 1
        args.steps = 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        first = [first_sample(folder, int(tokens), args.rounds) for tokens in args.tokens]
        show(f"seconds from opening a corpus to its first {BATCH} samples of {SEQ_LENGTH} tokens", first)
        rows = list(speed(folder, args.rounds))
        show(f"samples of {SEQ_LENGTH} tokens", rows)
        step = share(folder, args.steps)
        show("the quickstart's step in one process", [step])
    if args.output:
        write(args.output, rows, first_sample=first, quickstart=step)
    return 0


def first_sample(folder: Path, num_tokens: int, rounds: int) -> Row:
    """Return the median over fresh processes, imports excluded."""
    num_documents = max(num_tokens // (1000 if num_tokens < 10**12 else 10_000), 1)
    prefix = folder / "sparse"
    write_sparse(prefix, num_tokens, num_documents)
    words = [str(prefix), str(SEQ_LENGTH), str(BATCH), str(VOCAB_SIZE)]
    command = [sys.executable, "-c", FIRST, *words]
    seconds = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)]
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").unlink()
    row = {"tokens": f"{num_tokens:.0e}", "documents": num_documents}
    return row | {"median s": statistics.median(seconds), "worst s": max(seconds)}


def write_sparse(prefix: Path, num_tokens: int, num_documents: int) -> None:
    """Write zeros, in documents of equal length."""
    length = num_tokens // num_documents
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * length * num_documents)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        starts = range(0, num_documents, BLOCK)
        for start in starts:
            file.write(np.full(min(BLOCK, num_documents - start), length, "<i4").tobytes())
        for start in starts:
            file.write((np.arange(start, min(start + BLOCK, num_documents), dtype="<i8") * 2 * length).tobytes())
        for start in range(0, num_documents + 1, BLOCK):
            file.write(np.arange(start, min(start + BLOCK, num_documents + 1), dtype="<i8").tobytes())


def speed(folder: Path, rounds: int, num_tokens: int = 50_000_000, num_samples: int = 2048) -> Iterator[Row]:
    """Return samples/s of all contestants, interleaved."""
    prefix = folder / "random"
    write_sparse(prefix, num_tokens, num_tokens // 1000)
    np.random.default_rng(1).integers(VOCAB_SIZE, size=num_tokens, dtype=np.uint16).tofile(f"{prefix}.bin")
    steps = contestants(folder, prefix, num_samples)
    turns = interleaved(steps, rounds, warmup=1)
    for name in steps:
        wall, cpu = (statistics.median(getattr(turn, clock) for turn in turns[name]) for clock in ("wall_s", "cpu_s"))
        yield {
            "what": name,
            "samples/s": num_samples / wall,
            "samples/s per core": num_samples / cpu,
            "ours_over_this": times_faster(turns, "ours", name),
        }


def contestants(folder: Path, prefix: Path, num_samples: int) -> Mapping[str, Callable[[], object]]:
    """Return functions by name that read `num_samples` samples, in another order each time."""
    data = IndexedDataset(prefix)
    samples = TokenFileSamples(data, Split(0, data.num_tokens), SEQ_LENGTH, VOCAB_SIZE, 1)
    draw, tokens = np.random.default_rng(2), np.memmap(f"{prefix}.bin", np.uint16, "r")

    def ours() -> None:
        begin = int(draw.integers(1 << 20))
        for start in range(begin, begin + num_samples, BATCH):
            samples.read(np.arange(start, start + BATCH))

    def bare() -> None:
        for offset in draw.integers(len(tokens) - SEQ_LENGTH - 1, size=num_samples).tolist():
            np.asarray(tokens[offset : offset + SEQ_LENGTH + 1], np.int64)

    found = {"ours": ours, "bare memmap": bare}
    theirs = megatron_dataset(folder, prefix)
    if theirs is None:
        return found

    def megatron() -> None:
        begin = int(draw.integers(len(theirs) - num_samples))
        for index in range(begin, begin + num_samples):
            theirs[index]

    return found | {"megatron-core GPTDataset": megatron}


class EndToken:
    """The part of a tokenizer that GPTDataset uses."""

    vocab_size, eod = VOCAB_SIZE, 0
    pad = -1
    unique_identifiers: Mapping[str, str] = {"class": "EndToken"}


def megatron_dataset(folder: Path, prefix: Path) -> Any:
    """Return megatron-core's samples of the whole corpus, without masks; None where the package is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
            from megatron.core.datasets.utils import Split as TheirSplit
        except ImportError:
            print("megatron-core is not installed, and is left out")
            return None
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=SEQ_LENGTH,
            blend=([str(prefix)], None),
            split="1,0,0",
            path_to_cache=str(folder / "cache"),
            tokenizer=EndToken(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        low = Theirs(str(prefix))
        begin = time.perf_counter()
        made = GPTDataset(low, str(prefix), np.arange(len(low), dtype=np.int32), None, TheirSplit.train, config)
        print(f"megatron-core's index of {len(low)} documents: {time.perf_counter() - begin:.2f} s")
    return made


def share(folder: Path, num_steps: int) -> Row:
    """Return the share of a step of the quickstart's model spent reading, and waiting for prefetched batches."""
    alone = ["parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]
    config = read_config(Path("configs/quickstart.yaml"), alone).config
    spec, cpu = RunSpec(config, 1, VOCAB_SIZE), torch.device("cpu")
    batches, state = spec.batches, build_state(spec, connect(spec), cpu)
    data, sizes = IndexedDataset(folder / "random"), (config.train.micro_batch_size, config.train.global_batch_size)
    samples = TokenFileSamples(data, Split(0, data.num_tokens), spec.arch.seq_length, VOCAB_SIZE, 1)
    loader = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, cpu)
    ahead, settings = (
        PrefetchingLoader(loader, batches),
        StepSettings(1, batches.last.num_tokens, batches.last.num_samples),
    )
    reads, waits = [], []
    steps = []
    for _ in range(num_steps + 2):
        begin = time.perf_counter()
        loader.read(state.consumed_samples + 10**6)
        read = time.perf_counter()
        batch = ahead.step(state.consumed_samples)
        waited = time.perf_counter()
        train_step(state, batch, 1e-3, settings).loss.item()
        reads.append(read - begin)
        waits.append(waited - read)
        steps.append(time.perf_counter() - read)
    step, read, wait = (statistics.median(seconds[2:]) for seconds in (steps, reads, waits))
    row = {"step ms": 1e3 * step, "read ms": 1e3 * read, "waited ms": 1e3 * wait}
    return row | {"read %": 100 * read / step, "waited %": 100 * wait / step}


if __name__ == "__main__":
    sys.exit(main())
