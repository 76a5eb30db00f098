"""Fact: verify_layout.py keeps every axis of a layout, accepts a right one, and says where a wrong one differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.config.validate.rules import check
from megatron3d.errors import ExitCode
from megatron3d.model.linear_spec import num_parameters
from megatron3d.model.spec import attention_kind
from megatron3d.parallel.layout import ParamSpec
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.validate import write_schedule
from megatron3d.runtime import process
from megatron3d.verify.layouts import differences
from tests.support.equality import run_trace
from tests.support.tiny_run import ROOT, launch
from tests.support.turn_ranks import run_turns
from tools import verify_layout

PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))
MODES_FOLDER = ROOT / "configs" / "modes"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_verified_layout_is_small_and_has_every_axis(path: Path) -> None:
    asked = read_config(path).config
    experts = asked.parallel.expert_model_parallel_size
    for data in (experts, 3 * experts):
        world_size = RunSpec(asked).sizes.model * data
        batch = asked.train.model_copy(update={"global_batch_size": asked.train.micro_batch_size * data * 8})
        config = asked.model_copy(update={"train": batch})
        small, num_ranks = verify_layout.shrink(config, world_size)
        assert check(small, num_ranks) == []
        spec, verified = RunSpec(config, world_size), RunSpec(small, num_ranks, verify_layout.VOCAB_SIZE)
        assert verified.mesh.axes == tuple((name, min(size, 2)) for name, size in spec.mesh.axes)
        assert verified.mode.expand == spec.mode.expand
        assert verified.num_microbatches == 2 * verified.mesh.sizes["pipeline"]
        groups, heads = small.model.num_query_groups, small.model.num_attention_heads
        assert (groups in (None, heads)) == (config.model.num_query_groups in (None, config.model.num_attention_heads))
        assert num_parameters(verified.arch) < 2e6


LONG = ROOT / "configs" / "llama-8b-128k.yaml"
WINDOWS = ["model.window_size=[1023,0]", "model.window_attn_skip_freq=[1,1,1,1,1,0]", "model.no_rope_freq=4"]
DOCUMENTS = ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"]


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_every_exchange_is_verified_with_its_windows_and_documents(exchange: str) -> None:
    typed = [f"parallel.cp_comm_type={exchange}", *WINDOWS, *DOCUMENTS]
    typed += ["parallel.hierarchical_context_parallel_sizes=[4,2]"] if exchange == BOTH else []
    small, num_ranks = verify_layout.shrink(read_config(LONG, typed).config, 64)
    assert check(small, num_ranks) == []
    spec, parallel = RunSpec(small, num_ranks, verify_layout.VOCAB_SIZE), small.parallel
    assert parallel.cp_comm_type == exchange and parallel.context_parallel_size == (4 if exchange == BOTH else 2)
    assert [attention_kind(spec.arch, layer).window for layer in range(2)] == [spec.arch.seq_length // 4 + 1, None]
    assert spec.packing(0).reset_attention_mask
    whole_batch = small.train.model_copy(update={"micro_batch_size": small.train.global_batch_size})
    alone = small.model_copy(update={"parallel": ParallelConfig(), "train": whole_batch})
    expected, got = run_trace(0, 1, alone, 2), run_turns(run_trace, num_ranks, small, 2)[0]
    assert expected is not None and list(differences(expected, got, 1e-10)) == []


def pipelines(**parallel: object) -> Config:
    """Return pipelines with eight single sequences and 20 layers."""
    model = {"num_layers": 20, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    return Config.model_validate({"model": model, "train": {"global_batch_size": 8}, "parallel": parallel})


@pytest.mark.parametrize("has_layout", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_shrunk_pipeline_keeps_two_ranks(name: str, has_layout: bool) -> None:
    for virtual in (None, SCHEDULES[name].min_virtual, SCHEDULES[name].max_virtual or 5):
        given = {"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": virtual}
        stages = 4 * (virtual or SCHEDULES[name].min_virtual)
        if has_layout:
            given["pipeline_model_parallel_layout"] = [20, *[0] * (stages - 1)]  # type: ignore[assignment]
        small, num_ranks = verify_layout.shrink(pipelines(pipeline_model_parallel_size=4, **given), 4)
        assert num_ranks == 2 and check(small, num_ranks) == []
        spec = RunSpec(small, num_ranks, verify_layout.VOCAB_SIZE)
        pipeline = spec.pipeline
        assert small.parallel.pipeline_schedule == name and spec.num_microbatches == 4
        assert len(pipeline.stages) == 2 * SCHEDULES[name].min_virtual
        assert len({len(stage.layers) for stage in pipeline.stages}) == 2


def test_a_schedule_from_a_file_is_not_shrunk(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    write_schedule(build_schedule("interleaved", 4, 8, 3), file)
    parallel = {"pipeline_schedule": "file", "pipeline_schedule_file": str(file), "pipeline_model_parallel_size": 4}
    config = pipelines(**parallel)
    assert verify_layout.default_world_size(config) == 4
    small, num_ranks = verify_layout.shrink(config, 4)
    assert num_ranks == 4 and verify_layout.problems(small, 4) == []
    assert RunSpec(small, 4).num_microbatches == 8 and small.model.num_layers == 13
    assert list(verify_layout.too_large(small, 4)) == []
    (problem,) = verify_layout.too_large(small, 32)
    assert "its 4 ranks make 32 processes" in problem and "more than 16; verify a file of at most 2 ranks" in problem


def verify(*typed: str) -> str:
    """Return the tool's output for a correct layout."""
    child = launch(["tools/verify_layout.py", "--config", *typed])
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, out + err
    return out


def test_a_correct_layout_equals_one_process() -> None:
    out = verify(str(MODES_FOLDER / "2d.yaml"), "--world-size", "4")
    assert "verified: world_size 4 = TP 4 (2d: r 2 x c 2) x PP 1 x DP 1" in out
    assert "EQUAL: 3 steps in float64 on 4 ranks and on one agree within 1e-10" in out


def test_a_correct_pipeline_equals_one_process(tmp_path: Path) -> None:
    """A preset's interleaving runs as a schedule from a file that gives one rank three stages and the other one."""
    file = tmp_path / "mine.csv"
    file.write_text("0F0,1F0,0F1,1F1,3F0,3B0,3F1,3B1,1B0,0B0,1B1,0B1\n2F0,2F1,2I0,2W0,2B1\n")
    typed = ["--steps", "1", "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2"]
    typed += ["parallel.pipeline_schedule=file", f"parallel.pipeline_schedule_file={file}"]
    typed += ["parallel.virtual_pipeline_model_parallel_size=null", "train.global_batch_size=2"]
    out = verify(str(ROOT / "configs" / "llama-70b.yaml"), "--world-size", "2", *typed)
    assert f"pipeline: file {file}, 4 stages on 2 ranks, layers 1+1+2+1, expected bubble" in out
    assert "EQUAL: 1 steps in float64 on 2 ranks" in out


def test_tokens_that_choose_other_experts_are_counted() -> None:
    """Experts in bf16 choose as in float64 but for near ties; a layout in float64 chooses as one process does."""
    typed = ["--world-size", "2", "--steps", "1", "parallel.pipeline_model_parallel_size=1"]
    typed += ["parallel.expert_model_parallel_size=2", "model.num_layers=2", "train.global_batch_size=2"]
    out = verify(str(ROOT / "configs" / "models" / "mixtral-8x7b.yaml"), *typed)
    assert "EQUAL: 1 steps in float64 on 2 ranks" in out
    counts = re.findall(r"bf16 on one process: layers\.(\d+)\.mlp\.router: (\d+) of (\d+) tokens choose other", out)
    assert [layer for layer, _, _ in counts] == ["0", "1"]
    assert all(0 <= int(flipped) < int(tokens) / 2 for _, flipped, tokens in counts)


def compare_with_a_wrong_rule(
    config_json: str, steps: int, tolerance: float, *rest: Any
) -> tuple[list[str], list[str]]:
    """Call verify_layout.compare without the gradient reduction over the ranks that share a parameter."""
    with mock.patch.object(ParamSpec, "reduce_axes", lambda spec, mesh: ()):
        return verify_layout.compare(config_json, steps, tolerance, *rest)


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under sequence parallelism tokens of norms and most biases are sharded, those of matrices are gathered."""
    right: Callable[..., tuple[list[str], list[str]]] = process.launch
    monkeypatch.setattr(process, "launch", lambda ranks, _, *rest: right(ranks, compare_with_a_wrong_rule, *rest))
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
    "a schedule that is not there": (
        ["parallel.pipeline_schedule=file", "parallel.pipeline_schedule_file=nowhere.csv"],
        "parallel.pipeline_schedule_file=nowhere.csv: nowhere.csv does not exist",
    ),
    "no GPU here": (["--device", "gpu"], "--device gpu: torch sees no GPU on this machine; use --device cpu"),
    "an impossible layout": (["parallel.tensor_parallel_shape=[3,2]"], "parallel.tensor_parallel_shape=[3,2]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(capsys: pytest.CaptureFixture[str], name: str) -> None:
    typed, words = BAD[name]
    config = ["--config", str(MODES_FOLDER / "2d.yaml")]
    code = process.run_program(lambda: verify_layout.main([*config, *typed]))
    shown = capsys.readouterr()
    assert (code, shown.out) == (ExitCode.USER_ERROR, "") and words in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize("typed", [["--steps", "0"], ["--world-size", "0"], ["--tolerance", "small"], ["--chek"]])
def test_bad_options(typed: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        verify_layout.make_parser().parse_args(["--config", "x", *typed])
    assert stopped.value.code == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_default_world_has_room_for_experts(path: Path) -> None:
    """Bug that this finds: a preset with EP 32 on the ranks of TP and PP alone is refused, with the advice EP 1."""
    config = read_config(path).config
    world_size = verify_layout.default_world_size(config)
    assert verify_layout.problems(config, world_size) == []
    small, num_ranks = verify_layout.shrink(config, world_size)
    ranks = small.parallel.expert_model_parallel_size
    assert num_ranks <= verify_layout.MAX_RANKS
    assert (f"experts: EP {ranks} x ETP 1" in verify_layout.arithmetic(small, num_ranks)) == (ranks > 1)
