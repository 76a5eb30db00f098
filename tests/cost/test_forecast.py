"""Fact: a run says what step time it expects of a known cluster, how to make one known, and how far it was off."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.config.architecture import architecture
from megatron3d.config.schema import Config
from megatron3d.cost import forecast as forecasting
from megatron3d.cost.forecast import Forecast, forecast
from megatron3d.errors import UserError

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 8192}


def expected(cluster: str | None, is_cpu: bool = False) -> Forecast | str:
    parts = {"model": MODEL, "train": {"precision": "bf16"}, "logging": {"cluster": cluster}}
    config = Config.model_validate(parts)
    return forecast(config, architecture(config.model, 8192), 8, is_cpu)


def test_a_known_cluster_is_predicted() -> None:
    found = expected("selene")
    assert isinstance(found, Forecast)
    assert found.line().startswith("step time by arithmetic on selene: ") and "products" in found.line()
    assert sum(found.parts.values()) == pytest.approx(found.step.step_s, rel=0.02)


def test_an_unknown_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "CLUSTERS", tmp_path)
    assert "set logging.cluster" in str(expected(None))
    assert "run tools/calibrate.py" in str(expected(None, is_cpu=True))
    with pytest.raises(UserError, match="cluster nowhere: there is none"):
        expected("nowhere")


def test_the_verdict_names_what_is_large_enough() -> None:
    found = expected("selene")
    assert isinstance(found, Forecast)
    seconds = found.step.step_s
    assert found.verdict(1.1 * seconds) == [
        f"step time predicted {seconds:.4g} s, measured {1.1 * seconds:.4g} s: +10 %"
    ]
    told, why = found.verdict(2 * seconds)
    assert "+100 %" in told and next(iter(found.parts)) in why
