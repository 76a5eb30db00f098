"""Fact: FLOPs, kept bytes, peak, traffic, time and the table have an operation as soon as a layer's list has it.

The bug that this finds: a prediction that knows the operations of a layer by name, and misses a new one.
"""

from __future__ import annotations

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.activations import layer_activations, total_bytes
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.layer import layer_times
from megatron3d.forecast.time.operation_table import operation_table
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.forecast.time.traffic import step_flops, step_traffic
from megatron3d.model import operations
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import MemoryKernel, Operation, Stored
from megatron3d.parallel.matmul_plan import Traffic

LAYERS, MICROBATCHES = 3, 2
KEPT, MOMENT, SENT, FLOPS = 3 * 2**20, 2**31, 2**24, 10**9
MODEL = {"num_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 2048}
NAME = "mlp.added"
CALL = Traffic("all_reduce", ("context",), SENT)


def added(local: LocalSizes) -> Operation:
    """Return an element-wise operation with numbers of its own."""
    return Operation(
        name=NAME,
        saves=(Stored(NAME, "result", KEPT),),
        kernels=(MemoryKernel("activation", 2**26),),
        flops=FLOPS,
        backward_flops=2 * FLOPS,
        sent=(CALL,),
        peaks={f"backward of {NAME}": MOMENT},
    )


class Predicted:
    """What is predicted of a step of a run."""

    def __init__(self) -> None:
        train = {"micro_batch_size": 2, "global_batch_size": 2 * MICROBATCHES, "precision": "bf16"}
        config = Config.model_validate({"model": MODEL, "parallel": {"context_parallel_size": 2}, "train": train})
        spec = RunSpec(config, 2, MODEL["vocab_size"])
        step, timed = make_step_spec(spec), simulated_step(spec, load_machine("eos", "bf16", 2))
        self.flops = step_flops(step)
        self.kept = total_bytes(layer_activations(step.local))
        self.memory = rank_memory(step)
        traffic, key = step_traffic(step), (CALL.collective, CALL.axes)
        self.calls, self.sent = traffic.calls[key], traffic.sent.get(key, 0)
        self.times = layer_times(timed.local, timed.machine)
        self.rows = [line for line in operation_table(timed.local, timed.machine) if line.endswith(f"  {NAME}")]


def test_every_prediction_has_an_operation_that_a_list_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    before, listed = Predicted(), operations._layer
    monkeypatch.setattr(operations, "_layer", lambda local: [*listed(local), added(local)])
    after = Predicted()
    assert after.flops - before.flops == 3 * FLOPS * LAYERS * MICROBATCHES
    assert after.kept - before.kept == KEPT
    assert after.memory.activations - before.memory.activations == KEPT * LAYERS
    name = f"backward of {NAME}"
    assert name not in before.memory.transient_peaks
    assert max(after.memory.transient_peaks, key=lambda each: after.memory.transient_peaks[each]) == name
    assert after.memory.total - before.memory.total > MOMENT - max(before.memory.transient_peaks.values())
    assert after.calls - before.calls == LAYERS * MICROBATCHES
    assert after.sent - before.sent == SENT * LAYERS * MICROBATCHES
    assert after.times.forward.total > before.times.forward.total
    assert after.times.backward.total > before.times.backward.total
    assert not before.rows and len(after.rows) == 1
    assert "3.000" in after.rows[0]
