"""Verify that a configuration's layout computes the numbers of one process: `verify_layout.py --config FILE
[overrides]`.

The model and the axes are made small, every axis above 1 staying above 1; a schedule from a file keeps its ranks and
microbatches, and layers are divided among stages again.  Some steps are trained in float64 on one
process and on the requested layout over gloo on this machine; losses, gradient norms, gradients and parameters are
compared, and the first tensor that differs is named.  With experts, the tokens of the first step that
choose other experts in the configured precision are counted.  With `--device gpu` all ranks share this machine's GPUs,
one is enough; the process that they are compared with computes on the CPU.  Exit code 0: equal, 1: different, 2: wrong
input.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import CONTEXT, Mesh
from megatron3d.parallel.modes import MODES
from megatron3d.runtime import process
from megatron3d.runtime.arguments import real, whole
from megatron3d.runtime.program import parse_first


def make_parser() -> ConfigParser:
    """Return the parser of `--config FILE [--world-size N] [--steps N] [section.key=value ...]`."""
    parser = ConfigParser("verify_layout.py", __doc__.split(":")[0])
    parser.add_argument("--config", type=Path, required=True, help="the run whose layout is verified")
    parser.add_argument(
        "--world-size",
        type=whole(1, 10**6),
        help="processes of the real run; default: TP x CP x PP, times what EP and ETP need, and twice that if possible",
    )
    parser.add_argument("--steps", type=whole(1, 1000), default=3, help="training steps that are compared")
    parser.add_argument("--tolerance", type=real(0, 1), default=1e-10, help="relative")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="what the ranks compute on")
    parser.add_argument(
        "--lag-ms",
        type=real(0, 1000),
        default=0.0,
        help="start every collective later by this, with its output poisoned, so that a missing wait is found",
    )
    parser.add_overrides("values that replace those in the file")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.attention.context.plan import head_axes
from megatron3d.config.read import read_config
from megatron3d.config.report import batch_arithmetic
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig, ParallelConfig
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.layout import file_problems
from megatron3d.config.validate.rules import check

VOCAB_SIZE = 61
HEAD_SIZE = 8
# Keys of the model that choose kinds of layers over depth.
PATTERNS = ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")
EXPERT_WIDTHS = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
MAX_RANKS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Shrink the configuration, run it and one process, and compare."""
    args = make_parser().parse_args(argv)
    config = read_config(args.config, args.overrides).config
    world_size = args.world_size or default_world_size(config)
    UserError.collect((*problems(config, world_size), *missing_device(args.device)))
    small, num_ranks = shrink(config, world_size)
    UserError.collect((*check(small, num_ranks), *too_large(small, num_ranks)))
    print(f"asked:    {arithmetic(config, world_size)}", flush=True)
    print(f"verified: {arithmetic(small, num_ranks)}", flush=True)
    options = args.steps, args.tolerance, args.device, args.lag_ms / 1e3, config.train.precision
    found, flipped = process.launch(num_ranks, compare, small.model_dump_json(), *options)
    for line in flipped:
        print(f"{config.train.precision} on one process: {line} than in float64")
    for line in found[:10]:
        print(f"DIFFERENT {line}")
    if not found:
        print(f"EQUAL: {args.steps} steps in float64 on {num_ranks} ranks and on one agree within {args.tolerance:g}")
    return 1 if found else 0


def arithmetic(config: Config, world_size: int) -> str:
    """Return the factors of world size and batch, and the ranks of experts where there are any."""
    experts, split = config.parallel.expert_model_parallel_size, config.parallel.expert_tensor_parallel_size
    ranks = f"\nexperts: EP {experts} x ETP {split}" if experts * split > 1 else ""
    return batch_arithmetic(RunSpec(config, world_size)) + ranks


def default_world_size(config: Config) -> int:
    """Return TP x CP x PP, times what experts need, or twice that where data-parallel ranks are possible and cheap."""
    dense, parallel = RunSpec(config).sizes.model, config.parallel
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    alone = next((dense * n for n in range(1, experts + 1) if not problems(config, dense * n)), dense)
    shared = not problems(config, 2 * alone) and shrink(config, 2 * alone)[1] <= MAX_RANKS
    return 2 * alone if shared else alone


def problems(config: Config, world_size: int) -> list[str]:
    """Return the rules that a configuration and its schedule file break; no other file is read."""
    return [*check(config, world_size), *file_problems(Facts(config, world_size))]


def missing_device(device: str) -> Iterator[str]:
    """Yield the error of a device that this machine lacks."""
    if device == "gpu" and not process.num_gpus():
        yield "--device gpu: torch sees no GPU on this machine; use --device cpu"


def too_large(small: Config, num_ranks: int) -> Iterator[str]:
    """Yield the error of a schedule file with too many ranks, since it cannot be shrunk."""
    if RunSpec(small).has_schedule_file and num_ranks > MAX_RANKS:
        ranks = small.parallel.pipeline_model_parallel_size
        yield (
            f"parallel.pipeline_schedule_file={small.parallel.pipeline_schedule_file}: its {ranks} ranks make "
            f"{num_ranks} processes with the other axes at 2, more than {MAX_RANKS}; verify a file of at most "
            f"{MAX_RANKS * ranks // num_ranks} ranks, or with fewer axes"
        )


def shrink(config: Config, world_size: int) -> tuple[Config, int]:
    """Return a small model with this layout: axes above 1 become 2, and sizes are multiples of them."""
    spec = RunSpec(config, world_size)
    mesh, mode = spec.mesh, spec.mode
    is_file = spec.has_schedule_file
    sizes = {name: size if is_file and name == "pipeline" else min(size, 2) for name, size in mesh.axes}
    parallel = shrink_parallel(config.parallel, sizes).model_copy(update=_expert_ranks(spec, sizes))
    shrunk = spec.with_config(config.model_copy(update={"parallel": parallel}))
    model = shrink_model(config.model, shrunk, mesh.size(mode.inner[1]))
    sequences = math.prod(sizes[axis] for axis in mode.sequence_axes)
    micro = sequences * (2 if config.train.micro_batch_size > mesh.size(mode.sequence_axes) else 1)
    microbatches = spec.num_microbatches if is_file else min(spec.num_microbatches, 2 * sizes["pipeline"])
    batch = micro * sizes["replica"] * sizes["data"] * microbatches
    train = config.train.model_copy(
        update={
            "micro_batch_size": micro,
            "global_batch_size": batch,
            "precision": "fp64",
            "loss_chunk_tokens": 12,
            "bucket_mb": 0.01,
        }
    )
    # Clipping by the norm would spread one wrong gradient over all of them.
    optimizer = config.optimizer.model_copy(update={"clip_grad": 0.0})
    small = config.model_copy(update={"model": model, "parallel": parallel, "train": train, "optimizer": optimizer})
    return small, math.prod(sizes.values())


def shrink_parallel(parallel: ParallelConfig, sizes: Mapping[str, int]) -> ParallelConfig:
    """Return this mode and schedule with axes of these sizes, and at most two stages per rank."""
    virtual = parallel.virtual_pipeline_model_parallel_size
    return parallel.model_copy(
        update={
            "tensor_model_parallel_size": None,
            "context_parallel_size": math.prod(size for axis, size in sizes.items() if axis in CONTEXT),
            "hierarchical_context_parallel_sizes": tuple(sizes[axis] for axis in CONTEXT[::-1])
            if CONTEXT[1] in sizes
            else None,
            "tensor_parallel_shape": tuple(sizes[name] for name in MODES[parallel.tensor_parallel_mode].axis_names),
            "pipeline_model_parallel_size": sizes["pipeline"],
            "virtual_pipeline_model_parallel_size": virtual and min(virtual, 2),
            "pipeline_model_parallel_layout": None,
        }
    )


def _expert_ranks(spec: RunSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many ranks distribute and split experts: all of each axis on which they do, or on a piece of it."""
    whole, split = ({axis.split(".")[0] for axis in axes} for axes in (spec.mode.experts, spec.mode.etensor))
    return {
        "expert_model_parallel_size": math.prod(sizes[axis] for axis in whole),
        "expert_tensor_parallel_size": math.prod(sizes[axis] for axis in split - whole),
    }


def shrink_model(model: ModelConfig, shrunk: RunSpec, head_ranks: int) -> ModelConfig:
    """Return a model of this kind with a layer more than stages; grouped-query attention stays uneven if it was."""
    unit, num_stages = shrunk.tensor_size, len(shrunk.stage_owners)
    contexts, mode = shrunk.sizes.context, shrunk.mode
    shared = Mesh(mode.axes).size(head_axes(mode.exchange, mode.context)) if mode.context else 1
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    small_groups = unit if groups >= head_ranks else 1
    num_layers, seq_length = max(num_stages, min(model.num_layers, num_stages + 1)), 2 * unit * contexts
    patterns = {name: shrink_pattern(getattr(model, name), num_layers) for name in PATTERNS}
    return model.model_copy(
        update={
            "num_layers": num_layers,
            "hidden_size": 3 * HEAD_SIZE * unit,
            "ffn_hidden_size": 5 * unit,
            "num_attention_heads": shared * (unit if groups == heads else 2 * unit),
            **_head_sizes(model, unit, shared * small_groups if groups == heads else small_groups),
            **{name: getattr(model, name) and 10 * unit for name in EXPERT_WIDTHS},
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
            "window_size": model.window_size and (max(1, seq_length // 4), 0),
            **patterns,
            "vocab_size": VOCAB_SIZE,
            "make_vocab_size_divisible_by": 1,
        }
    )


def shrink_pattern(pattern: int | tuple[int, ...] | None, num_layers: int) -> int | tuple[int, ...] | None:
    """Return a pattern over depth that fits into the layers: a longer one becomes its first two different entries."""
    if pattern is None or isinstance(pattern, int):
        return pattern and min(pattern, num_layers)
    return pattern if len(pattern) <= num_layers else (pattern[0], 1 - pattern[0])


def _head_sizes(model: ModelConfig, unit: int, groups: int) -> dict[str, int | None]:
    """Return small heads: with latents that `unit` ranks shard, where the model has these."""
    if not model.multi_latent_attention:
        return {"num_query_groups": groups, "kv_channels": HEAD_SIZE}
    return {
        "q_lora_rank": model.q_lora_rank and 3 * unit,
        "kv_lora_rank": 2 * unit,
        "qk_head_dim": HEAD_SIZE,
        "qk_pos_emb_head_dim": 2 * unit,
        "v_head_dim": HEAD_SIZE,
    }


def compare(
    config_json: str, steps: int, tolerance: float, device: str = "cpu", lag_s: float = 0.0, precision: str = "fp64"
) -> tuple[list[str], list[str]]:
    """Run this rank of the layout, and on rank 0 also the single-process reference; return the differences.

    With experts and another precision, also return how many tokens choose other experts in it.
    """
    from megatron3d.comm.host_comm import HostComm, LaggingComm
    from megatron3d.comm.interface import Comm
    from megatron3d.train.state import connect
    from megatron3d.verify.layouts import differences, flips, trace

    config, on_cpu = Config.model_validate_json(config_json), device == "cpu"
    with process.start(on_cpu=on_cpu, shares_gpus=not on_cpu) as here:
        spec = RunSpec(config, here.world_size, VOCAB_SIZE, here.rank)
        comm: Comm = connect(spec)
        if lag_s:
            comm = LaggingComm(comm, lag_s)
        elif not on_cpu:
            comm = HostComm(comm)
        got = trace(spec, comm, steps, device=here.device)
    if got is None:
        return [], []
    whole_batch = config.train.model_copy(update={"micro_batch_size": config.train.global_batch_size})
    alone = config.model_copy(update={"parallel": ParallelConfig(), "train": whole_batch})
    reference = trace(whole := RunSpec(alone, 1, VOCAB_SIZE), connect(whole), steps)
    assert reference is not None, "one process is rank 0"
    found = list(differences(reference, got, tolerance))
    if config.model.num_moe_experts is None or precision == "fp64":
        return found, []
    rounded = alone.model_copy(update={"train": whole_batch.model_copy(update={"precision": precision})})
    other = trace(whole := RunSpec(rounded, 1, VOCAB_SIZE), connect(whole), 1)
    assert other is not None, "one process is rank 0"
    return found, list(flips(reference, other))


if __name__ == "__main__":
    sys.exit(process.run_program(main))
