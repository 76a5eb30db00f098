"""Python's share of a layer: forward and backward at sizes at which no kernel takes time, ours and torch's modules.

python benchmarks/layer_overhead.py [--output benchmarks/results/NAME.json]

Contestants take turns.  `linear`: one of our linears with main_grad, and F.linear.  `layer`: one of our GPT-2 layers,
and the block of the plain GPT, from the same weights; outputs are compared first.  The difference is what is left for
our code: it is the same at all sizes, and on a GPU it must fit under the kernels of a layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from common.report import Row, Turns, interleaved, show, write
from common.shapes import Ours, Size
from peers.plain_gpt import Block, PlainGPT, gpt2_weights
from torch import Tensor, nn

from megatron3d.model.layers import Layer
from megatron3d.model.modules import MLP

TINY = Size(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16, seq_length=4, batch_size=1)
REPEATS = 50  # calls per turn

Compute = Callable[[Tensor], Tensor]


def repeatedly(compute: Compute, x_MH: Tensor, reset: Callable[[], object]) -> None:
    """Call forward and backward `REPEATS` times; `reset` drops or renews the gradients before."""
    reset()
    for _ in range(REPEATS):
        y = compute(x_MH)
        y.backward(y.detach())
        x_MH.grad = None


def turns(precision: str, rounds: int) -> tuple[Turns, Turns]:
    """Return the turns of the linears and of the layers."""
    ours = Ours(TINY, TINY.config(precision))
    theirs = PlainGPT(TINY.spec(TINY.config(precision)).arch).to(ours.state.model.head_weight.dtype)
    theirs.load_state_dict(gpt2_weights(ours.weights()))
    tokens = TINY.tokens()
    at = ours.state.model.begin(tokens, TINY.num_tokens)
    layer, block = cast(Layer, ours.state.model.layers["0"]), cast(Block, theirs.h[0])
    x_MH = ours.state.model.embedding(at, ours.state.model.embedding_weight).detach().requires_grad_()
    compare(layer(x_MH, at), block(x_MH.unsqueeze(0))[0])

    renew = partial(ours.state.buffers.begin_step, 10**9)
    drop = partial(nn.Module.zero_grad, theirs)
    fc1, weight, bias = cast(MLP, layer.mlp).fc1, block.mlp.c_fc.weight, block.mlp.c_fc.bias
    linears: Mapping[str, Callable[[], object]] = {
        "megatron3d": partial(repeatedly, fc1, x_MH, renew),
        "torch": partial(repeatedly, lambda x_MH: F.linear(x_MH, weight, bias), x_MH, drop),
    }
    layers: Mapping[str, Callable[[], object]] = {
        "megatron3d": partial(repeatedly, lambda x_MH: layer(x_MH, at), x_MH, renew),
        "torch": partial(repeatedly, block, x_MH.detach().unsqueeze(0).requires_grad_(), drop),
    }
    return interleaved(linears, rounds, 2), interleaved(layers, rounds, 2)


def compare(ours: Tensor, theirs: Tensor) -> None:
    """Check that both layers compute the same."""
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def rows(precision: str, rounds: int) -> list[Row]:
    """Return microseconds per forward and backward: of the best turns, which other programs disturb least."""
    found: list[Row] = []
    for what, measured in zip(("linear", "layer"), turns(precision, rounds), strict=True):
        ours, torchs = (1e6 / REPEATS * min(turn.cpu_s for turn in measured[name]) for name in ("megatron3d", "torch"))
        times = {"ours_us": ours, "torch_us": torchs, "beyond_us": ours - torchs}
        found.append({"what": what, "precision": precision, **times})
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precisions", nargs="+", choices=("fp64", "fp32", "bf16"), default=["fp64", "fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=15, help="timed turns per contestant; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.precisions, options.rounds = ["fp32"], 1
    torch.set_num_threads(1)
    found = [row for precision in options.precisions for row in rows(precision, options.rounds)]
    show("Forward and backward, microseconds of CPU time", found)
    if options.output:
        write(options.output, found)


if __name__ == "__main__":
    main()
