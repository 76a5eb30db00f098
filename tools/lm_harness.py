"""Evaluate a checkpoint on tasks of EleutherAI's lm-evaluation-harness: on one process, or under torchrun.

It needs the optional package `lm_eval`.  Every rank makes the same requests in the same order; rank 0 reports.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import CHECKPOINT, add_iteration, add_weights, positive, whole
from megatron3d.runtime.program import parse_first


def make_parser() -> ConfigParser:
    """Return the parser of `--load RUN --tasks NAME [NAME ...] ... [section.key=value ...]`."""
    parser = ConfigParser("lm_harness.py", __doc__.split(":")[0])
    parser.add_argument("--load", type=Path, required=True, metavar="RUN", help=CHECKPOINT)
    add_iteration(parser)
    add_weights(parser)
    parser.add_argument("--tasks", type=lambda text: text.split(","), required=True, help="names, between commas")
    parser.add_argument("--include-path", type=Path, help="a folder with tasks of your own")
    parser.add_argument(
        "--num-fewshot", type=whole(0, 1000), help="examples before each question; default: as the task says"
    )
    parser.add_argument("--limit", type=positive, help="questions of each task; default: all")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=8, help="texts at a time")
    parser.add_overrides("on the run's configuration")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import torch

from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.inference.lm_eval_adapter import Harness, as_lm
from megatron3d.inference.load import read_run, resolve, restore


def main(argv: Sequence[str] | None = None) -> int:
    """Load the checkpoint, evaluate the tasks, and print on rank 0; return the exit code."""
    args = make_parser().parse_args(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval is not installed: pip install lm_eval")
    env = process.launcher_env()
    folder = resolve(args.load, args.iteration)
    config = read_run(folder, args.overrides, env.world_size)
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    begin = tokenizer.special.before_text(config.data.add_bos_token)
    with process.start() as here, torch.no_grad():
        import lm_eval
        from lm_eval.tasks import TaskManager

        executor = restore(config, tokenizer, folder, here, args.weights)
        model = as_lm(Harness(executor, tokenizer, here.device, args.batch_size, begin))
        tasks = TaskManager(include_path=str(args.include_path) if args.include_path else None)
        found = lm_eval.simple_evaluate(
            model, tasks=args.tasks, num_fewshot=args.num_fewshot, limit=args.limit, task_manager=tasks
        )
        if here.rank == 0:
            print(json.dumps(found["results"], indent=2, default=str))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(process.run_program(main))
