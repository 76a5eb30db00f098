"""verify_layout.py keeps every axis of a layout, finds a right one equal and a wrong one different, and says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from megatron3d import runtime
from megatron3d.config.check import check
from megatron3d.config.derive import architecture, make_mesh, num_microbatches, tensor_mode, tensor_size
from megatron3d.config.read import read_config
from megatron3d.layout import ParamSpec
from megatron3d.model.count import num_parameters
from tests.end_to_end import ROOT, launch
from tools import verify_layout

PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))
MODES_FOLDER = ROOT / "configs" / "modes"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_what_is_verified_is_small_and_has_every_axis(path: Path) -> None:
    asked = read_config(path).config
    for data in (1, 3):
        world_size = tensor_size(asked.parallel) * asked.parallel.pipeline_model_parallel_size * data
        batch = asked.train.model_copy(update={"global_batch_size": asked.train.micro_batch_size * data * 5})
        config = asked.model_copy(update={"train": batch})
        small, num_ranks = verify_layout.shrink(config, world_size)
        assert check(small, num_ranks) == []
        mesh, verified = make_mesh(config.parallel, world_size), make_mesh(small.parallel, num_ranks)
        assert verified.axes == tuple((name, min(size, 2)) for name, size in mesh.axes)
        assert tensor_mode(small.parallel).expand == tensor_mode(config.parallel).expand
        assert num_microbatches(small, verified) == 2
        groups, heads = small.model.num_query_groups, small.model.num_attention_heads
        assert (groups == heads) == (config.model.num_query_groups in (None, config.model.num_attention_heads))
        assert num_parameters(architecture(small.model, verify_layout.VOCAB_SIZE)) < 2e6


def test_a_right_layout_is_equal() -> None:
    process = launch(["tools/verify_layout.py", "--config", str(MODES_FOLDER / "2d.yaml"), "--world-size", "4"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "verified: world_size 4 = TP 4 (2d: r 2 x c 2) x PP 1 x DP 1" in out
    assert "EQUAL: 3 steps in float64 on 4 ranks and on one agree within 1e-10" in out


def compare_with_a_wrong_rule(config_json: str, steps: int, tolerance: float) -> list[str]:
    """As verify_layout.compare, but no gradient is summed over the ranks that share its parameter."""
    with mock.patch.object(ParamSpec, "reduce_axes", lambda spec, mesh: ()):
        return verify_layout.compare(config_json, steps, tolerance)


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With sequence parallelism the tokens of a norm and of most biases are spread, those of matrices are gathered."""
    right: Callable[..., list[str]] = runtime.launch
    monkeypatch.setattr(runtime, "launch", lambda ranks, _, *rest: right(ranks, compare_with_a_wrong_rule, *rest))
    typed = ["--config", str(MODES_FOLDER / "1d-sp.yaml"), "--world-size", "2", "--steps", "1"]
    typed += ["parallel.tensor_model_parallel_size=2"]
    assert verify_layout.main(typed) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERENT")]
    assert lines[0].startswith("DIFFERENT gradient norm of step 1: ")
    assert lines[1].startswith("DIFFERENT gradient.") and len(lines) == 10
    assert not any("mlp.fc1.weight" in line or "mlp.fc2.weight" in line for line in lines)


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
    "unknown key": (["model.hidden_sise=3"], "unknown key; use model.hidden_size"),
    "ranks that do not factor": (["--world-size", "6"], "world_size 6: not a multiple of TP 4"),
    "an impossible layout": (["parallel.tensor_parallel_shape=[3,2]"], "parallel.tensor_parallel_shape=[3,2]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(capsys: pytest.CaptureFixture[str], name: str) -> None:
    typed, words = BAD[name]
    config = ["--config", str(MODES_FOLDER / "2d.yaml")]
    code = runtime.run_program(lambda: verify_layout.main([*config, *typed]))
    shown = capsys.readouterr()
    assert (code, shown.out) == (runtime.EXIT_USER_ERROR, "") and words in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize("typed", [["--steps", "0"], ["--world-size", "0"], ["--tolerance", "small"], ["--chek"]])
def test_bad_options(typed: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        verify_layout.parse_args(["--config", "x", *typed])
    assert stopped.value.code == 2
