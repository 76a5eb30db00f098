"""Fact: the table of operations adds up to the predicted times, kept bytes and FLOPs, and has every GEMM.

The bug that this finds: an operation whose time or traffic a prediction counts and the table does not show.
"""

from __future__ import annotations

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.activations import embedding_activations, head_activations, run_activations, total_bytes
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.layer import TimedTasks, layer_times
from megatron3d.forecast.time.operation_table import operation_lists, operation_table
from megatron3d.forecast.time.step import SimulatedStep, ends_times, load_machine, simulated_step
from megatron3d.forecast.time.traffic import step_flops
from megatron3d.model.spec import LayerRun

MODEL = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 2048}
RECOMPUTE = {
    "nothing": {},
    "full": {"recompute_granularity": "full"},
    "core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp_act"]},
}


def a_step(recompute: str, **parallel: object) -> tuple[SimulatedStep, RunSpec]:
    train = {"micro_batch_size": 2, "global_batch_size": 2, "precision": "bf16", **RECOMPUTE[recompute]}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    num_ranks = 8 if parallel else 1
    spec = RunSpec(config, num_ranks, MODEL["vocab_size"])
    return simulated_step(spec, load_machine("eos", "bf16", num_ranks)), spec


def totals(step: SimulatedStep) -> list[list[float]]:
    """Return the numbers of the last row of each list."""
    lines = operation_table(step.local, step.machine)
    return [[float(cell.replace(",", "")) for cell in line.split()[:7]] for line in lines if line.endswith("in all")]


@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8}], ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_table_adds_up(recompute: str, parallel: dict[str, object]) -> None:
    step, spec = a_step(recompute, **parallel)
    local, machine = step.local, step.machine
    embedding, layer, head = totals(step)
    expected = ends_times(local, machine)[0], layer_times(local, machine), ends_times(local, machine)[1]
    for row, times in zip((embedding, layer, head), expected, strict=True):
        assert row[5:] == pytest.approx([1e3 * times.forward.total, 1e3 * times.backward.total], abs=6e-4)
    run = LayerRun(range(1), is_recomputed=recompute == "full")
    kept = (
        total_bytes(embedding_activations(local)),
        run_activations(local, run),
        total_bytes(head_activations(local)),
    )
    header = operation_table(local, machine)[0].split()
    per_byte, per_flop = {"KiB": 2**10, "MiB": 2**20}[header[3]], {"MFLOP": 1e6, "GFLOP": 1e9}[header[0]]
    for row, num_bytes in zip((embedding, layer, head), kept, strict=True):
        assert row[2] * per_byte == pytest.approx(num_bytes, abs=1e-3 * per_byte)
    flops = sum(sum(row[:2]) for row in (embedding, layer, head))
    assert flops * per_flop == pytest.approx(step_flops(make_step_spec(spec)), abs=5e-3 * per_flop)


def test_every_gemm_takes_time_and_has_flops() -> None:
    step, _ = a_step("nothing")
    for _, local, operations, _ in operation_lists(step.local):
        timed = TimedTasks.of(operations, local, step.machine)
        for each in operations:
            times = timed.sums(task for task in timed.tasks if task.operation == each.name)
            assert (times.forward.total > 0) == bool(each.kernels or each.moves or each.flops), each.name
            assert ("GEMMs" in times.forward) == (each.matmul is not None), each.name
