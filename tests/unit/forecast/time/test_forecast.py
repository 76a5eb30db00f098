"""Fact: a run logs its predicted step time on a known cluster, how to describe a cluster, and its prediction error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.forecast.time import forecast as forecasting
from megatron3d.forecast.time.forecast import Forecast, forecast
from megatron3d.forecast.time.hardware import load_accelerator
from megatron3d.linear.overlap_plan import ExposedComm

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 8192}


def forecast_of(config: Config, cluster: str | None, num_ranks: int, is_cpu: bool = False) -> Forecast | str:
    config = config.model_copy(update={"logging": config.logging.model_copy(update={"cluster": cluster})})
    return forecast(RunSpec(config, num_ranks, 8192), is_cpu)


def expected(cluster: str | None, is_cpu: bool = False) -> Forecast | str:
    config = Config.model_validate({"model": MODEL, "train": {"precision": "bf16"}})
    return forecast_of(config, cluster, 8, is_cpu)


def test_a_known_cluster_is_predicted() -> None:
    found = expected("selene")
    assert isinstance(found, Forecast)
    assert found.line().startswith("step time by arithmetic on selene: ") and "GEMMs" in found.line()
    assert sum(found.parts.values()) == pytest.approx(found.step.step_s, rel=0.02)


def test_an_unknown_cluster_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "CLUSTERS", tmp_path)
    assert "set logging.cluster" in str(expected(None))
    assert "run tools/calibrate.py" in str(expected(None, is_cpu=True))
    with pytest.raises(UserError, match="cluster nowhere: there is none"):
        expected("nowhere")


def test_the_verdict_names_the_assumption_that_is_off() -> None:
    """Every part that is far off is named, the worst first, and no other."""
    found = expected("selene")
    assert isinstance(found, Forecast)
    seconds, parts = found.step.step_s, found.parts
    (told,) = found.compare(1.1 * seconds, {})
    assert told == f"step time predicted {seconds:.4g} s, measured {1.1 * seconds:.4g} s: +10 %"
    assert not [line for line in found.compare(seconds, parts) if "it assumes" in line]
    slow = {**parts, "computation": parts["computation"] + 0.2 * seconds, "data": 0.5 * seconds}
    worst, next_one = (line for line in found.compare(1.7 * seconds, slow) if "it assumes" in line)
    assert worst.startswith("data is +") and "next batch" in worst
    assert not next_one.endswith("again")
    (own,) = (line for line in replace(found, cluster="local_gpu").compare(1.7 * seconds, slow) if "GEMMs at" in line)
    assert own.endswith("; run tools/calibrate.py again")
    assert next_one.startswith("computation is +") and "TFLOP/s and memory at" in next_one and "a100.yaml" in next_one


def test_a_slow_link_is_named() -> None:
    """The message names the level of the cluster that the axis' ring crosses, with its bandwidth."""
    parallel = {"tensor_model_parallel_size": 2}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": {"precision": "bf16"}})
    found = forecast_of(config, "perlmutter", 8)
    assert isinstance(found, Forecast)
    for axis, where in (("t", "76 GB/s through node (Perlmutter)"), ("data", "GB/s through network (Perlmutter)")):
        slow = {**found.parts, ExposedComm((axis,)): found.step.step_s}
        assert any(f"along {axis} is +" in line and where in line for line in found.compare(1.0, slow))


def test_compilation_removes_memory_accesses_of_rotary_embeddings() -> None:
    """Uncompiled, rotary embeddings take ten passes over q and k in forward and backward; compiled, two."""
    model = {**MODEL, "position_embedding_type": "rope"}
    train = {"precision": "bf16", "micro_batch_size": 8, "global_batch_size": 8}
    eager, compiled = (
        forecast_of(Config.model_validate({"model": model, "train": {**train, "compile": compiles}}), "selene", 1)
        for compiles in (False, True)
    )
    assert isinstance(eager, Forecast) and isinstance(compiled, Forecast)
    kernels = load_accelerator("a100").kernels
    assert kernels is not None
    spared = 4 * 2 * (10 - 2) * (8 * 1024) * 2 * 1024 * 2
    assert eager.step.step_s - compiled.step.step_s == pytest.approx(spared / kernels.bytes_per_s, rel=1e-6)
