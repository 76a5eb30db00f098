"""Sample text from a checkpoint, in any layout: bare on one process, or under torchrun with `parallel.*` overrides.

Every step runs the whole context through the model; the layout changes nothing but where it is computed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron3d import runtime
from megatron3d.checkpoint.store import resolve
from megatron3d.config.check import check
from megatron3d.config.check_pipeline import file_problems
from megatron3d.config.derive import schedule_file, tensor_size
from megatron3d.config.facts import Facts
from megatron3d.config.read import read_config
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.data.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from megatron3d.layout import span
from megatron3d.pipeline.schedules import FILE, load_schedule, num_microbatches
from megatron3d.train.flow import Flow
from megatron3d.train.resume import load_weights
from megatron3d.train.state import build_state, connect


def main(argv: Sequence[str] | None = None) -> int:
    """Load, sample, print on rank 0."""
    args = parse_args(argv)
    place = runtime.placement()
    folder = resolve(args.load)
    config = read_run(folder, args.overrides, place.world_size)
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise UserError(f"--prompt {args.prompt!r}: no token; give at least one character")
    with runtime.start() as here, torch.no_grad():
        flow = load_model(config, tokenizer, folder, here)
        generator = torch.Generator().manual_seed(args.seed)
        tokens = sample(flow, prompt, args, generator, tokenizer.eod, here.device)
        if here.rank == 0:
            print(tokenizer.decode(tokens))
    return runtime.EXIT_DONE


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """`--load RUN [--prompt TEXT] ... [section.key=value ...]`."""
    parser = argparse.ArgumentParser("generate.py", description="Sample text from a checkpoint.", allow_abbrev=False)
    parser.add_argument("--load", type=Path, required=True, help="a run's folder, or one of its checkpoints")
    parser.add_argument("--prompt", default="\n")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="on the run's configuration")
    args = parser.parse_intermixed_args(argv)
    if args.max_new_tokens < 0 or args.temperature < 0 or args.top_k < 0:
        parser.error("--max-new-tokens, --temperature and --top-k must be at least 0")
    return args


def read_run(folder: Path, overrides: Sequence[str], world_size: int) -> Config:
    """The run's own configuration; its layout is used under a launcher, and one process is enough without."""
    config = read_config(folder.parent / "config.yaml", overrides).config
    if world_size == 1 and not any(text.startswith("parallel.") for text in overrides):
        config = config.model_copy(update={"parallel": ParallelConfig()})
    parallel, rows = config.parallel, tensor_size(config.parallel)
    step = rows * max(world_size // (rows * parallel.pipeline_model_parallel_size), 1)
    config = with_batch(config, rows, step)
    UserError.collect(check(config, world_size))
    if parallel.pipeline_schedule == FILE:  # it is for as many microbatches as it has, of which sampling uses one
        config = with_batch(config, rows, step * num_microbatches(load_schedule(schedule_file(parallel))))
        UserError.collect(file_problems(Facts(config, world_size)))
    return config


def with_batch(config: Config, micro_batch_size: int, global_batch_size: int) -> Config:
    """The same with other batch sizes."""
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
    return config.model_copy(update={"train": config.train.model_copy(update=batch)})


def load_model(config: Config, tokenizer: Tokenizer, folder: Path, here: runtime.Runtime) -> Flow:
    """The model with the checkpoint's weights, on this rank."""
    state = build_state(config, *connect(config, tokenizer.vocab_size, here.world_size, here.rank), here.device)
    load_weights(folder, state, {"tokenizer": tokenizer.fingerprint})
    return state.flow


def sample(
    flow: Flow,
    prompt: list[int],
    args: argparse.Namespace,
    generator: torch.Generator,
    eod: int | None,
    device: torch.device,
) -> list[int]:
    """The prompt and what follows it, up to the end of the document; equal on every rank."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + args.max_new_tokens:
        logits_V = next_logits(flow, tokens[-flow.model.arch.seq_length :], device)
        token = choose(logits_V, args.temperature, args.top_k, generator)
        if token == eod:
            break
        tokens.append(token)
    return tokens


def next_logits(flow: Flow, context: list[int], device: torch.device) -> Tensor:
    """Logits [V] after the context, on the CPU; a layout that splits the batch or the tokens gets enough of both."""
    model = flow.model
    mesh, mode = model.comm.mesh, model.mode
    sequences, tokens = mesh.size(mode.inner[0]), mesh.size(mode.residual[0])
    rows = sequences * (tokens // math.gcd(tokens, sequences * model.arch.seq_length))
    padding = -len(context) % (tokens // math.gcd(tokens, rows))
    low, high = span(rows, mode.batch_axes, mesh)
    tokens_BS = torch.tensor(context + [0] * padding, device=device).expand(high - low, -1)
    return flow.logits(tokens_BS, len(context) - 1)[0].cpu()


def choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token drawn from the softmax of logits / temperature over the `top_k` likeliest."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(min(top_k, len(logits_V))).values[-1], float("-inf"))
    weights = (logits_V.double() / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


if __name__ == "__main__":
    sys.exit(runtime.run_program(main))
