"""Attention of long sequences on one CPU thread: peak memory, and time of documents and windows against torch's.

python benchmarks/attention.py [--output benchmarks/results/attention.json]

`peak`: live bytes of forward and backward beyond q, k and v, measured by the FLOP and memory meter on fake tensors, and
predicted: output, log-sum-exp, gradients, those of a pair, and a mask.  `time`: seconds of forward and backward of
the whole causal sequence, of eight documents, and of a window, next to torch's kernel under a dense mask of the same
documents; outputs are compared first.  `forward`: the forward pass in eight documents, next to torch's compiled
flex_attention.  `resident`: growth of the process's resident memory during forward and backward,
in a process of its own per row, next to the same prediction.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common.report import Row, interleaved, milliseconds, show, write
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron3d.attention.packed import Visible, packed_attention
from megatron3d.attention.plan import Kind, pairs_of_sequence
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter

HEADS, SIZE = 8, 64
# The longest sequence for which torch gets a dense mask.
DENSE, LONGEST_DENSE = "torch, dense mask of them", 8192
# Every freed tensor goes back to the system at once, so that resident memory follows the live bytes.
RETURNS_MEMORY = ("env", "MALLOC_MMAP_THRESHOLD_=65536", "OMP_NUM_THREADS=1")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def projections(seq: int) -> list[Tensor]:
    """Return q, k and v [1, heads, S, D] as the model has them."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, seq, HEADS, SIZE, generator=generator).requires_grad_() for _ in range(3))
    return [each.transpose(1, 2) for each in made]


def eighths(seq: int) -> Visible:
    """Return eight documents of the same length."""
    return Visible((tuple(range(seq // 8, seq, seq // 8)),))


def forward_backward(attend: Attend, qkv: list[Tensor]) -> None:
    """Compute attention and the gradients of q, k and v."""
    y = attend(qkv[0], qkv[1], qkv[2])
    torch.autograd.grad(y, qkv, y.detach())


def peak_row(seq: int, name: str, visible: Visible) -> Row:
    """Return measured and predicted bytes beyond q, k and v."""
    with FakeTensorMode():
        qkv = [torch.empty(1, seq, HEADS, SIZE, requires_grad=True).transpose(1, 2) for _ in range(3)]
        with FlopMemoryMeter(qkv) as meter:
            meter.reset_peak()
            before = meter.num_bytes
            forward_backward(lambda q, k, v: packed_attention(q, k, v, visible), qkv)
    predicted, measured = predicted_bytes(seq, visible), meter.peak_bytes - before
    return {"what": "peak", "case": name, "seq": seq, "bytes": measured, "predicted": predicted} | {
        "predicted_over_measured": predicted / measured,
        "dense_mask_bytes": seq * seq * 4,
    }


def predicted_bytes(seq: int, visible: Visible) -> int:
    """Return the bytes of forward and backward beyond q, k and v."""
    element = HEADS * SIZE * 4
    starts = visible.starts[0] if visible.starts else ()
    pairs = pairs_of_sequence(seq, starts, visible.window)
    rows = [(p.queries[1] - p.queries[0], p.keys[1] - p.keys[0], p.kind is Kind.MASKED) for p in pairs]
    longest = max(queries + 2 * keys for queries, keys, _ in rows)
    masks = max(queries * keys * (1 + 4) * is_masked for queries, keys, is_masked in rows)  # bool, and added in fp32
    return 4 * seq * element + seq * HEADS * 4 + longest * element + masks


CASES: dict[str, Callable[[int], Visible]] = {
    "whole": lambda seq: Visible(),
    "eight documents": eighths,
    "window of 1024": lambda seq: Visible(None, 1024),
}


def resident_growth(name: str, seq: int) -> int:
    """Return the bytes by which this process's resident memory grows during forward and backward; Linux."""
    torch.set_num_threads(1)
    visible = CASES[name](seq)
    forward_backward(lambda q, k, v: packed_attention(q, k, v, CASES[name](256)), projections(256))
    qkv = projections(seq)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes the memory that is resident now
    before = resident("VmHWM")
    forward_backward(lambda q, k, v: packed_attention(q, k, v, visible), qkv)
    return resident("VmHWM") - before


def resident(key: str) -> int:
    """Return bytes of this process by a key of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def resident_row(name: str, seq: int) -> Row:
    """Return the growth of resident memory in a process of its own, and the prediction."""
    command = [*RETURNS_MEMORY, sys.executable, __file__, "--resident", name, str(seq)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured, predicted = int(done.stdout), predicted_bytes(seq, CASES[name](seq))
    row = {"what": "resident", "case": name, "seq": seq, "bytes": measured, "predicted": predicted}
    return row | {"predicted_over_measured": predicted / measured}


def dense(seq: int, visible: Visible) -> Tensor:
    """Return the additive mask [S, S]."""
    see = visible.mask(0, range(seq), range(seq), torch.device("cpu"))
    return torch.zeros(see.shape).masked_fill_(see.logical_not_(), float("-inf"))


def time_rows(seq: int, rounds: int) -> list[Row]:
    """Return milliseconds of one length, and their ratio to the whole causal sequence."""
    documents, window, qkv = eighths(seq), Visible(None, 1024), projections(seq)
    cases: dict[str, Attend] = {
        "whole": partial(F.scaled_dot_product_attention, is_causal=True),
        "eight documents": lambda q, k, v: packed_attention(q, k, v, documents),
        "window of 1024": lambda q, k, v: packed_attention(q, k, v, window),
    }
    if seq <= LONGEST_DENSE:
        cases[DENSE] = partial(F.scaled_dot_product_attention, attn_mask=dense(seq, documents))
        torch.testing.assert_close(cases["eight documents"](*qkv), cases[DENSE](*qkv), rtol=1e-4, atol=1e-5)
    turns = interleaved({name: partial(forward_backward, each, qkv) for name, each in cases.items()}, rounds, 1)
    whole = min(turn.cpu_s for turn in turns["whole"])
    return [
        {"what": "time", "case": name, "seq": seq, **milliseconds(each)}
        | {"share_of_whole": min(turn.cpu_s for turn in each) / whole}
        for name, each in turns.items()
    ]


def forward_rows(seq: int, rounds: int) -> list[Row]:
    """Return milliseconds of the forward pass in eight documents, ours and compiled flex_attention's.

    flex_attention has no backward on CPUs.
    """
    documents, (q, k, v) = eighths(seq), (each.detach() for each in projections(seq))
    document = torch.arange(seq) // (seq // 8)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    blocks = create_block_mask(sees, None, None, seq, seq, device="cpu")
    flex = torch.compile(flex_attention, dynamic=False)  # its CPU code for sizes that vary does not compile
    cases: dict[str, Callable[[], Tensor]] = {
        "eight documents": lambda: packed_attention(q, k, v, documents),
        "eight documents, flex_attention": lambda: flex(q, k, v, block_mask=blocks),
    }
    with torch.no_grad():
        ours, theirs = (case() for case in cases.values())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        turns = interleaved(cases, rounds, 1)
    return [{"what": "forward", "case": name, "seq": seq, **milliseconds(each)} for name, each in turns.items()]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="timed turns per case; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--resident", nargs=2, metavar=("CASE", "SEQ"), help="print the growth of resident memory only")
    options = parser.parse_args()
    if options.resident:
        print(resident_growth(options.resident[0], int(options.resident[1])))
        return
    torch.set_num_threads(1)
    lengths = (256,) if options.quick else (8192, 16384, 32768)
    timed = (256,) if options.quick else (4096, 8192, 16384)
    rounds = 1 if options.quick else options.rounds
    peaks = [peak_row(seq, name, make(seq)) for name, make in CASES.items() for seq in lengths]
    grown = [resident_row(name, seq) for name in [*CASES][: 1 if options.quick else None] for seq in lengths]
    times = [row for seq in timed for row in time_rows(seq, rounds)]
    forward = [row for seq in timed for row in forward_rows(seq, rounds)]
    show("Live bytes of forward and backward beyond q, k and v", peaks)
    show("Growth of resident memory", grown)
    show("Forward and backward", times)
    show("Forward", forward)
    if options.output:
        write(options.output, [*peaks, *grown, *times, *forward])


if __name__ == "__main__":
    main()
