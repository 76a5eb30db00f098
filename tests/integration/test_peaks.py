"""Fact: the peak that is predicted is that of a dry run, in every kind of layout; the worst is printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common.loopback import LoopbackComm
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.flat_buffers import flat_buffer_sizes
from megatron3d.forecast.memory.rank import rank_memory, stage_activations
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.memory.sweep import Sweep, update_bytes
from megatron3d.model.local_sizes import KERNELS
from megatron3d.pipeline.actions import COMPUTATIONS, ActionKind
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.schedules import FROM_FILE
from megatron3d.train.state import build_state
from megatron3d.verify.dry_run import microbatches, run_rank, step_totals, with_few_microbatches
from tests.support.covering import Row
from tests.support.equality import VOCAB_SIZE, configure
from tests.support.layout_rows import ROWS, build, name_of, pick

FACTORS = ("schedule", "overlap", "recompute", "ZeRO", "model", "layers", "form", "exchange")
# Rows whose peaks were predicted worst: a head whose partial dX is copied, a gradient buffer that comes with a GEMM, a
# wgrad whose operands lived on, parts that are received, a stage of the embedding alone.
WORST: list[Row] = [
    {"form": ("2d", "weight_stationary"), "shape": (1, 4), "schedule": ("zb-h1", 1), "model": "gpt2, tied, dropout"},
    {"form": ("2d", "summa"), "shape": (1, 4), "schedule": (FROM_FILE, None), "model": "Gemma 3's layers"},
    {"form": ("grid", "all_reduce"), "schedule": ("gpipe", 1), "exchange": "a2a", "ZeRO": 3},
    {"form": ("1d", "replicated"), "schedule": ("zb-2p", 1), "ZeRO": 2, "model": "gpt2, tied, dropout"},
    {"form": ("3d", "tokens"), "shape": (2, 1, 4)},
    {"form": ("1d", "replicated"), "shape": (4,), "schedule": (FROM_FILE, None)},
    {"form": ("2.5d", "weight_stationary"), "shape": (2, 1, 1), "schedule": (FROM_FILE, None)},
    {"form": ("grid", "scatter"), "schedule": ("zb-v", 2), "recompute": "mixture of experts"},
]


def place_of(wanted: Row) -> int:
    """Return the first row with these values."""
    return next(place for place, row in enumerate(ROWS) if row.items() >= wanted.items())


COVERING = pick([frozenset((name, row[name]) for name in FACTORS) for row in ROWS])
PLACES = list(dict.fromkeys((*COVERING, *map(place_of, WORST))))
TOLERANCE = 0.02
# The process group of a dry run receives a reduce-scatter's sum, as NCCL does.
KERNEL = replace(KERNELS["cpu"], num_received=0)


# A grid, whose dW are reduced next to the backward of the operation before.
GRID: Row = {
    **dict.fromkeys(("data ranks", "replicas", "pipeline ranks"), 1),
    "dispatcher": None,
    "form": ("grid", "scatter"),
    "shape": (1, 1, 2),
    "context ranks": 4,
    "exchange": "p2p",
    "model": "gpt2, tied, dropout",
    "documents": "positions go on",
    "recompute": "nothing",
    "overlap": "all",
    "layers": "by cost",
    "folding": "dense",
    "schedule": (None, None),
    "ZeRO": 0,
    "batch": 0,
}


def last_rank(row: Row, folder: Path) -> tuple[RunSpec, StepSpec]:
    """Return the last rank of a row, whose coordinates are not 0."""
    _, config, num_ranks = build(row, folder)
    spec = RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)
    return spec, make_step_spec(spec, KERNEL)


def peak_error(row: Row, folder: Path) -> tuple[float, str]:
    """Return how far the predicted peak is from that of a dry run, and both in words."""
    spec, step = last_rank(row, folder)
    run = run_rank(with_few_microbatches(spec))
    measured, memory = step_totals(run, lower(spec.schedule)[run.coord]), rank_memory(step)
    return memory.total / measured.peak - 1, f"{memory.total} bytes, {measured.peak} are measured"


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_the_peak_is_that_of_a_dry_run(place: int, tmp_path: Path) -> None:
    error, told = peak_error(ROWS[place], tmp_path)
    assert abs(error) < TOLERANCE, told


def test_a_dw_lives_until_its_reduction_is_over(tmp_path: Path) -> None:
    """Without that the peak would be 4.7 % lower."""
    error, told = peak_error(GRID, tmp_path)
    assert abs(error) < 0.005, told


def test_rms_norm_frees_the_gradient_of_its_output_first() -> None:
    """The peak is in its backward, and would be 1 % higher if that gradient lived on."""
    model = {"family": "llama", "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256}
    config = configure(model, {}, precision="bf16", micro_batch_size=8, global_batch_size=16, loss_chunk_tokens=128)
    spec = RunSpec(config, 1, VOCAB_SIZE)
    run = run_rank(spec)
    measured = step_totals(run, lower(spec.schedule)[run.coord])
    memory = rank_memory(make_step_spec(spec, KERNEL))
    assert max(memory.transient_peaks, key=lambda name: memory.transient_peaks[name]) == "norm in fp32"
    assert memory.total == pytest.approx(measured.peak, rel=0.005)


def test_microbatches_share_the_rotary_tables_of_their_positions() -> None:
    """Those of two chunks are copied: of each microbatch they would be memory that no prediction counts."""
    parallel = {"context_parallel_size": 2, "cp_comm_type": "p2p"}
    config = configure({"position_embedding_type": "rope"}, parallel, micro_batch_size=1, global_batch_size=2)
    spec = RunSpec(config, 2, VOCAB_SIZE, 1)
    with FakeTensorMode():
        state = build_state(spec, LoopbackComm(spec.mesh), torch.device("cpu"), has_values=False)
        first, second = (state.model.begin(each.tokens, 1) for each in microbatches(spec))
    assert first.rotary[0][0] is second.rotary[0][0]


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_what_forward_bears_dies_in_backward(place: int, tmp_path: Path) -> None:
    """A stage keeps the sum of its activations; each use of a parameter has a gradient; nothing is left at the end."""
    _, step = last_rank(ROWS[place], tmp_path)
    flats = flat_buffer_sizes(step)
    sweep, arrived = Sweep(step, flats), Counter[int]()
    kinds = {action.kind for action in step.actions if action.kind in COMPUTATIONS}
    backward = (ActionKind.I, ActionKind.W) if ActionKind.W in kinds else (ActionKind.B,)
    whole = [ActionKind.F, *backward]
    for stage in step.stages:
        left = {kind: sum(event.births - event.deaths for event in sweep.events(kind, stage.index)) for kind in whole}
        assert left[ActionKind.F] == stage_activations(step, stage)
        assert sum(left.values()) == 0
        for event in (event for kind in whole for event in sweep.events(kind, stage.index)):
            arrived.update(sweep.buffers_of(event, stage.index))
    assert arrived == Counter({place: sum(flat.uses.values()) for place, flat in enumerate(flats)})
    *_, last = sweep.moments(step.actions)
    assert last.live + last.tops["update"] == update_bytes(step, flats)
