"""Fact: in rounds a collective costs what is longer than its GEMM less one round, and what smaller GEMMs lose.

Only the axes of collectives in rounds are waited for less, and only where the plan has them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.breakdown import GEMMS, TimeBreakdown
from megatron3d.forecast.time.layer import LayerTimes, layer_times
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.linear.overlap_plan import ExposedComm

PAGE = Path(__file__).parents[4] / "docs" / "tensor_parallel.md"
# Mode, form, sizes, and the axes with less exposed time: in forward, in an unsplit backward, and in a dgrad alone.
CASES = [
    ("1d", "sequence_parallel", [8], "t", "t", "t"),
    ("2d", "weight_stationary", [2, 4], "c", "", "c"),
    ("3d", "heads", [2, 2, 2], "y", "y", "y"),
    ("3d", "tokens", [2, 2, 2], "yz", "yz", "yz"),
]


def times(mode: str, form: str, shape: list[int], rounds: bool) -> LayerTimes:
    """Return the times of a layer of 4096 features on eight H100, with rounds or without."""
    parallel: dict[str, Any] = {"tensor_parallel_mode": mode, "tensor_parallel_form": form}
    parallel |= {"tensor_parallel_shape": shape, "tp_comm_overlap": rounds}
    model = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096}
    train = {"micro_batch_size": 4, "global_batch_size": 4, "precision": "bf16"}
    spec = RunSpec(Config.model_validate({"model": model, "parallel": parallel, "train": train}), 8, 50000)
    step = simulated_step(spec, load_machine("eos", "bf16", 8))
    return layer_times(step.local, step.machine)


def waited(times: TimeBreakdown) -> dict[str, float]:
    """Return the exposed seconds by axes."""
    return {"".join(name.axes): seconds for name, seconds in times.items() if isinstance(name, ExposedComm)}


@pytest.mark.parametrize(("mode", "form", "shape", "forward", "backward", "dgrad"), CASES)
def test_less_is_waited_for(mode: str, form: str, shape: list[int], forward: str, backward: str, dgrad: str) -> None:
    plain, rounds = (times(mode, form, shape, rounds) for rounds in (False, True))
    for phase, less in (("forward", forward), ("backward", backward), ("input_grad", dgrad)):
        before, after = (getattr(each, phase) for each in (plain, rounds))
        old, new = waited(before), waited(after)
        assert {axes for axes in old if new.get(axes, 0.0) < old[axes] * (1 - 1e-9)} == set(less), phase
        assert all(new.get(axes, 0.0) == pytest.approx(old[axes]) for axes in old if axes not in less), phase
        assert after[GEMMS] >= before[GEMMS], "smaller GEMMs are not faster"
    assert rounds.weight_grad.total == pytest.approx(plain.weight_grad.total)


def test_the_page_says_what_a_layer_gains() -> None:
    (told,) = re.findall(r"on 8 H100 to take (\d+) % less time", PAGE.read_text(encoding="utf-8"))
    plain, rounds = (times("1d", "sequence_parallel", [8], rounds) for rounds in (False, True))
    before, after = (each.forward.total + each.backward.total for each in (plain, rounds))
    assert 100 * (1 - after / before) == pytest.approx(float(told), abs=5)
