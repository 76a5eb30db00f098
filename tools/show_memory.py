"""Prints the activations that one transformer layer keeps for backward, in every tensor-parallel mode.

The Markdown table has bytes per rank over s b h (sequence length, sequences, hidden size), by activation recomputation.

python tools/show_memory.py --hidden-size 12288 --num-attention-heads 128 --seq-length 2048 --world-size 1 8 64

With --cluster, the operations of each of these layouts instead: FLOPs, bytes kept and sent, and predicted times.
`local` is this machine, once tools/calibrate.py has measured it.

The numbers are sums over a layer's operations (megatron3d/model/operations.py); tests compare them with real steps.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from megatron3d.errors import UserError
from megatron3d.parallel.modes import MODES
from megatron3d.runtime.arguments import MAX_RANKS, ToolParser, whole
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="show_memory", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2", help="of the layer")
    parser.add_argument("--hidden-size", type=whole(1, 10**7), required=True, help="of the layer")
    parser.add_argument("--num-attention-heads", type=whole(1, 10**7), required=True, help="of the layer")
    parser.add_argument("--seq-length", type=whole(1, 10**7), required=True, help="tokens of a sequence")
    parser.add_argument("--micro-batch-size", type=whole(1, 10**7), default=16, help="sequences")
    parser.add_argument(
        "--world-size",
        type=whole(1, MAX_RANKS),
        nargs="+",
        required=True,
        metavar="N",
        help="ranks, all of them tensor-parallel",
    )
    parser.add_alias("--num-ranks", "--world-size")
    told = "list operations with their times on this file of megatron3d/hardware/clusters, or a path"
    parser.add_argument("--cluster", metavar="NAME", help=told)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.forecast.memory.activations import run_activations
from megatron3d.forecast.time.operation_table import operation_table
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.model.local_sizes import KERNELS, LocalSizes
from megatron3d.model.spec import CORE_ATTN, MLP_ACT, NO_RECOMPUTE, LayerRun, Recompute

BF16_BYTES = 2
CHOICES: Mapping[str, Recompute] = {
    "none": NO_RECOMPUTE,
    "core_attn": Recompute("selective", frozenset({CORE_ATTN})),
    "core_attn, mlp_act": Recompute("selective", frozenset({CORE_ATTN, MLP_ACT})),
    "full": Recompute("full"),
}
HEADER = ("ranks", "mode", "form", "shape", *CHOICES)
ALIGN = ("--:", ":--", ":--", ":--", *("--:" for _ in CHOICES))


def layouts(arguments: argparse.Namespace) -> Iterator[tuple[int, str, str, tuple[int, ...], Config]]:
    """Yield every number of ranks, mode and form, with the default shape and the configuration.  Raises UserError."""
    for num_ranks in arguments.world_size:
        for mode, entry in MODES.items():
            shape = entry.default_shape(num_ranks)
            for form in entry.forms:
                config = configure(arguments, mode, form, shape)
                UserError.collect(check(config, num_ranks, None))
                yield num_ranks, mode, form, shape, config


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every number of ranks, mode and form."""
    for num_ranks, mode, form, shape, config in layouts(arguments):
        kept = (kept_bytes(config, num_ranks, choice) for choice in CHOICES.values())
        size = arguments.seq_length * arguments.micro_batch_size * arguments.hidden_size
        numbers = (f"{num_bytes / size:.2f}" for num_bytes in kept)
        yield str(num_ranks), mode, form, "·".join(map(str, shape)), *numbers


def configure(arguments: argparse.Namespace, mode: str, form: str, shape: tuple[int, ...]) -> Config:
    """Return a model of one layer; its vocabulary does not matter."""
    model = {name: getattr(arguments, name) for name in ("hidden_size", "num_attention_heads", "seq_length", "family")}
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
    batch = dict.fromkeys(("micro_batch_size", "global_batch_size"), arguments.micro_batch_size)
    model |= {"num_layers": 1, "vocab_size": arguments.hidden_size}
    return Config.model_validate({"model": model, "parallel": parallel, "train": {**batch, "precision": "bf16"}})


def kept_bytes(config: Config, num_ranks: int, recompute: Recompute) -> int:
    """Return the bytes that one rank keeps for a layer with the kernels of GPUs."""
    spec = RunSpec(config, num_ranks)
    local = LocalSizes(
        spec.arch, spec.mode, spec.mesh, config.train.micro_batch_size, BF16_BYTES, recompute, kernels=KERNELS["gpu"]
    )
    return run_activations(local, LayerRun(range(1), is_recomputed=recompute.granularity == "full"))


def show(arguments: argparse.Namespace) -> None:
    """Print the table, or the operations of every layout on a cluster."""
    if arguments.cluster:
        for num_ranks, mode, form, shape, config in layouts(arguments):
            step = simulated_step(RunSpec(config, num_ranks), load_machine(arguments.cluster, "bf16", num_ranks))
            print(f"{num_ranks} ranks, {mode}, {form}, {'·'.join(map(str, shape))}, on {arguments.cluster}:")
            print("\n".join(operation_table(step.local, step.machine)))
        return
    for cells in (HEADER, ALIGN, *rows(arguments)):
        print(f"| {' | '.join(cells)} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(show, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
