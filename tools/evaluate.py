"""Compute loss, perplexity and bits per byte of a checkpoint on a corpus: on one process, or under torchrun.

Every token of the corpus, or of one of its splits, is predicted once, from those before it in its window of
`model.seq_length` tokens, by the code that evaluates during training.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import CHECKPOINT, add_iteration, add_weights, positive, whole
from megatron3d.runtime.program import parse_first

WHOLE, SPLITS = "whole", ("train", "valid", "test")


def make_parser() -> ConfigParser:
    """Return the parser of `--load RUN [--split NAME] ... [section.key=value ...]`."""
    parser = ConfigParser("evaluate.py", __doc__.split(":")[0])
    parser.add_argument("--load", type=Path, required=True, metavar="RUN", help=CHECKPOINT)
    add_iteration(parser)
    add_weights(parser)
    parser.add_argument("--split", choices=(WHOLE, *SPLITS), default=WHOLE, help="of data.split; default: whole")
    parser.add_argument("--samples", type=positive, help="only this many windows from the start; default: all")
    parser.add_argument(
        "--micro-batch-size", type=whole(1, 10**6), help="sequences at a time; default: as few as the layout allows"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_overrides("such as data.data_path=PREFIX for another corpus")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.corpus.corpus import EvaluationWindows, open_corpus
from megatron3d.data.loader import BatchLoader
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.inference.load import read_run, resolve, restore
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.train.step import StepSettings, evaluate


def main(argv: Sequence[str] | None = None) -> int:
    """Load the checkpoint, evaluate, and print on rank 0; return the exit code."""
    args = make_parser().parse_args(argv)
    env = process.launcher_env()
    folder = resolve(args.load, args.iteration)
    config = read_run(folder, args.overrides, env.world_size, args.micro_batch_size)
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    samples = find_samples(config, tokenizer, args.split, args.samples)
    with process.start() as here, torch.no_grad():
        executor = restore(config, tokenizer, folder, here, args.weights)
        result = describe(config, samples, mean_loss(executor, config, samples, here.device))
        if here.rank == 0:
            print(json.dumps(result) if args.json else render(result))
    return ExitCode.DONE


def find_samples(config: Config, tokenizer: Tokenizer, split: str, most: int | None) -> EvaluationWindows:
    """Return the windows to evaluate; raises UserError if there is no token to predict."""
    vocab_size, seq_length = config.model.vocab_size or tokenizer.vocab_size, config.model.seq_length
    data = config.data.model_copy(update={"split": "1,0,0"} if split == WHOLE else {})
    train = config.train.model_copy(update={"eval_interval": None})  # so that no validation split is required
    config = config.model_copy(update={"data": data, "train": train})
    spec = RunSpec(config, vocab_size=tokenizer.vocab_size)
    corpus = open_corpus(spec.corpus, tokenizer, spec.packing(tokenizer.eod))
    found = corpus.train if split == WHOLE else getattr(corpus, split)
    if found is None:
        raise UserError(
            f"data.split={config.data.split}: {split} is shorter than one sample of {seq_length + 1} tokens; evaluate "
            "another split, or the whole corpus"
        )
    if len(found.sources) != 1:
        what = f"{len(found.sources)} corpora" if found.sources else "a dataset that is streamed"
        raise UserError(f"data.data_path: {what}; evaluate one corpus of token files at a time, data.data_path=PREFIX")
    source = found.sources[0]
    return EvaluationWindows(source.dataset, source.split, seq_length, vocab_size, most)


def mean_loss(executor: PipelineExecutor, config: Config, samples: EvaluationWindows, device: torch.device) -> float:
    """Return the mean loss per token in nats, the same on every rank."""
    model, train = executor.model, config.train
    loader = BatchLoader(
        samples, model.comm.mesh, model.mode.batch_axes, train.micro_batch_size, train.global_batch_size, device
    )
    steps = (loader.step(first) for first in range(0, samples.num_samples, train.global_batch_size))
    return evaluate(executor, steps, StepSettings(0, samples.num_tokens, train.global_batch_size))[0].item()


def describe(config: Config, samples: EvaluationWindows, loss: float) -> Mapping[str, object]:
    """Return the results by name; bits per byte is None if the tokenizer does not determine its tokens' bytes."""
    counts = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model).token_bytes()
    num_bytes = None if counts is None else samples.count_bytes(counts)
    return {
        "corpus": str(samples.dataset.prefix),
        "tokens": samples.num_tokens,
        "bytes": num_bytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / math.log(2) * samples.num_tokens / num_bytes if num_bytes else None,
    }


def render(result: Mapping[str, object]) -> str:
    """Return the results as text, one line per number."""
    unknown = "not known: the bytes of this tokenizer's tokens depend on their neighbours"
    lines = {name: unknown if value is None else value for name, value in result.items()}
    return "\n".join(f"{name.replace('_', ' '):<14} {value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(process.run_program(main))
