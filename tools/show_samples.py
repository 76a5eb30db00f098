"""Shows the text that a run trains on: the samples of some iterations, all or those of one rank of any layout.

    python tools/show_samples.py --config configs/quickstart.yaml --iterations 1-2
    python tools/show_samples.py --config configs/modes/3d.yaml --iterations 100 --world-size 16 --rank 5

It reads the corpus as training does, without a model, other processes or torch.distributed.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import UserError, one_line
from megatron3d.runtime.arguments import MAX_NUMBER, MAX_RANKS, positive, shorten, whole, whole_number
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ConfigParser:
    """Return the parser of the command line."""
    parser = ConfigParser("show_samples", __doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="of the run")
    parser.add_argument("--iterations", default="1", metavar="N", help="one, or FIRST-LAST")
    parser.add_argument("--world-size", type=whole(1, MAX_RANKS), default=1, help="ranks of the run")
    parser.add_argument(
        "--rank", type=whole(0, MAX_RANKS), help="what this rank reads; default: the whole global batch"
    )
    parser.add_argument("--max-characters", type=positive, default=100_000, help="of each sample")
    parser.add_overrides("on the configuration")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import numpy as np
import torch

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.data.corpus.corpus import BlendedSamples, open_corpus
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.data.loader import BatchLoader
from megatron3d.data.packing import IGNORED, Packing
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer


def show(arguments: argparse.Namespace) -> None:
    """Print the samples in the order in which training reads them."""
    first, last = parse_iterations(arguments.iterations)
    config = read_config(arguments.config, arguments.overrides).config
    UserError.collect(check(config, arguments.world_size))
    if arguments.rank is not None and not 0 <= arguments.rank < arguments.world_size:
        raise UserError(f"--rank {arguments.rank}: not below --world-size {arguments.world_size}; use 0 or more")
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    spec = RunSpec(config, arguments.world_size, tokenizer.vocab_size)
    packing, batches = spec.packing(tokenizer.eod), spec.batches
    corpus = open_corpus(spec.corpus, tokenizer, packing)
    samples = corpus.train
    for iteration in range(first, last + 1):
        begin = batches.consumed_samples(iteration - 1)
        batch = batches.at(begin)
        for number in positions(spec, arguments.rank, samples, batch.num_samples):
            what = describe(samples, begin + number, batch.seq_length, tokenizer, packing)
            skipped = " (skipped)" if iteration in config.train.iterations_to_skip else ""
            print(f"== iteration {iteration}{skipped}, {what}"[: arguments.max_characters])
    for fault in corpus.faults:
        print(one_line(f"left out: {fault}"), file=sys.stderr)


def parse_iterations(text: str) -> tuple[int, int]:
    """Parse `N` or `FIRST-LAST` to the first and last iteration; raises UserError."""
    first, dash, last = text.partition("-")
    begin, end = whole_number(first), whole_number(last if dash else first)
    if begin is None or end is None or not 1 <= begin <= end <= MAX_NUMBER:
        where = f"--iterations {shorten(text)}"
        raise UserError(f"{where}: neither an iteration from 1 on nor a range; use for example 5 or 1-10")
    return begin, end


def positions(
    spec: RunSpec, rank: int | None, samples: BlendedSamples | StreamedSamples, num_samples: int
) -> Sequence[int]:
    """Return the places in a global batch of the sequences that a rank reads; None: all of them."""
    if rank is None:
        return range(num_samples)
    mesh, sizes = spec.on_rank(rank).mesh, (spec.config.train.micro_batch_size, num_samples)
    return [
        int(place) for place in BatchLoader(samples, mesh, spec.mode.batch_axes, *sizes, torch.device("cpu")).positions
    ]


def describe(
    samples: BlendedSamples | StreamedSamples, number: int, length: int, tokenizer: Tokenizer, packing: Packing
) -> str:
    """Return where a sample comes from, and its text up to a length."""
    (tokens,) = samples.read(np.array([number]))[:, : length + 1]
    masked = int((packing.labels(torch.from_numpy(tokens[None])) == IGNORED).sum()) if packing.masks_loss else 0
    text = "".join(pieces(tokens.tolist(), tokenizer))
    return f"sample {number}, {samples.place(number)}{f', {masked} tokens not learnt' if masked else ''}\n{text}"


def pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text with a mark at the end of each document."""
    begin = 0
    for place in [place for place, token in enumerate(tokens) if token == tokenizer.eod]:
        yield tokenizer.decode(tokens[begin:place]) + "<end of document>"
        begin = place + 1
    yield tokenizer.decode(tokens[begin:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(show, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
