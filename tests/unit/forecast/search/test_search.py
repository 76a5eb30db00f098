"""Fact: the planner finds what an exhaustive search of layouts finds; each result fits and is a valid configuration."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.forecast.memory.rank import RankMemory
from megatron3d.forecast.search import search as searching
from megatron3d.forecast.search.bounds import in_order, layout_groups
from megatron3d.forecast.search.options import (
    ContextChoice,
    LayoutChoice,
    TensorChoice,
    context_sizes,
    signature,
    tensor_choices,
)
from megatron3d.forecast.search.problem import FixedKeys, PlanningProblem, PredictedLayout
from megatron3d.forecast.search.report import places
from megatron3d.forecast.search.search import SearchResult, search, worth_showing
from megatron3d.forecast.time.step import simulated_step, step_time
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES
from tests.support.pool import Pool
from tests.support.tiny_run import run_as_rank, steps, write_config
from tools import plan as tool

MODEL = {"num_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 8192}
ARGUMENTS = ("--cluster", "perlmutter", "--world-size", "8")


def problem(num_ranks: int = 8) -> PlanningProblem:
    train = {"global_batch_size": 8, "precision": "bf16"}
    return PlanningProblem(Config.model_validate({"model": MODEL, "train": train}), 8192, "perlmutter", num_ranks)


@cache
def found() -> SearchResult:
    return search(problem(), 3)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_a_search_runs(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it is as before, also if the search fails."""
    during = []

    def watched(*arguments: object) -> Iterator[object]:
        during.append(gc.isenabled())
        return in_order(*arguments)

    monkeypatch.setattr(searching, "in_order", watched)
    too_large = replace(problem(), spare=0.9999)
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(UserError, match="no layout of this model fits"):
            search(too_large, 1)
        assert gc.isenabled() is is_enabled
        assert search(problem(), 1).plans and gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert during == [False, False]


def test_the_best_is_the_best_of_all() -> None:
    """Every bound is a lower bound, and no layout that fits is faster than the first."""
    here, rejected = problem(4), Counter[str]()
    best = search(here, 1).plans[0].step.step_s
    bounds = list(in_order(list(layout_groups(here, rejected))))
    for bound in bounds[:: max(1, len(bounds) // 60)]:
        if not check(bound.layout.apply_to(here.config), 4, 8192):
            seconds = here.plan(bound.layout).step.step_s
            assert bound.seconds <= 1.02 * seconds, bound.layout
            assert seconds >= best


def test_bounds_come_in_order() -> None:
    """Groups are opened late: the order is that of all bounds, sorted, and equal ones stay in the order of groups."""
    groups = list(layout_groups(problem(), Counter[str]()))
    every = [bound for group in groups for bound in group.bounds()]
    assert len({bound.seconds for bound in every}) < len(every), "no ties"
    assert list(in_order(groups)) == sorted(every, key=lambda bound: bound.seconds)


def test_bounds_are_lower_with_compiled_kernels_and_large_heads() -> None:
    """A bound from slower kernels than those of the run would end the search before the best layout.

    With a vocabulary of 131072 the head is as much work as several layers, which no pipeline can spread over its ranks.
    """
    model, alone = {**MODEL, "family": "llama", "vocab_size": 131072}, TensorChoice("1d", "replicated", (1,))
    found = []
    for compiles in (False, True):
        train = {"global_batch_size": 32, "precision": "bf16", "compile": compiles}
        here = PlanningProblem(Config.model_validate({"model": model, "train": train}), 131072, "perlmutter", 4)
        bounds = {bound.layout: bound.seconds for bound in in_order(list(layout_groups(here, Counter[str](), ["1d"])))}
        for layout, tightness in ((LayoutChoice(alone, zero_stage=1), 0.9), (LayoutChoice(alone, 4), 0.7)):
            seconds = here.plan(layout).step.step_s
            assert tightness * seconds <= bounds[layout] <= seconds
        found.append(bounds[LayoutChoice(alone, zero_stage=1)])
    assert found[1] < 0.99 * found[0]


DEEP = {"family": "llama", "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 4096}
IN_FP8 = {"fp8": "e4m3", "fp8_param_gather": True}
NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.mark.parametrize(
    ("train", "optimizer"),
    [
        ({"precision": "bf16"}, {}),
        ({"precision": "fp32"}, {}),
        ({"precision": "bf16", **IN_FP8}, {}),
        ({"precision": "fp32", **IN_FP8, "num_layers_at_start_in_bf16": 40}, {}),
        ({"precision": "bf16"}, {"optimizer": "lion"}),
        ({"precision": "bf16"}, {"optimizer": "muon"}),
        ({"precision": "bf16"}, NARROW),
    ],
)
def test_no_layout_needs_less_memory_than_its_bound(train: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """A bound above the memory of a layout would leave that out; many layers make the state most of it."""
    model = {**DEEP, "seq_length": 128, "tie_embeddings": False}
    sections = {"model": model, "train": {"global_batch_size": 16, **train}, "optimizer": optimizer}
    here = PlanningProblem(Config.model_validate(sections), 1024, "eos", 8)
    parts: dict[tuple[str, int], float] = {}
    for group in layout_groups(here, Counter[str]()):
        layout = next(iter(group.bounds())).layout
        config, case = layout.apply_to(here.config), (layout.tensor.mode, layout.zero_stage)
        if case not in parts and layout.micro_batch_size == 1 and not check(config, 8, 1024):
            parts[case] = group.cost.least_bytes(group.share) / here.memory(here.spec(config)).total
    assert {zero for _, zero in parts} == {0, 1, 2, 3} and len(parts) == 16
    assert all(0.5 < part <= 1 for part in parts.values()), parts


def test_found_layouts_fit_and_are_in_order() -> None:
    plans = found().plans
    assert len(plans) == 3
    assert [plan.step.step_s for plan in plans] == sorted(plan.step.step_s for plan in plans)
    for plan in plans:
        assert plan.memory.total <= problem().memory_bytes
        assert check(plan.config, 8, 8192) == []
        assert 0 < problem().mfu(plan) < 0.8


def test_parts_add_up_to_the_step() -> None:
    for plan in found().plans:
        step = plan.step
        assert step.parts.total + step.bubble_s + step.optimizer_s == pytest.approx(step.step_s, rel=0.02)


def test_layouts_that_do_not_fit_do_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search continues however many of them are more promising than the first that fits."""
    memory, best = PlanningProblem.memory, found().plans[0]
    refused = iter(range(5))

    def larger(self: PlanningProblem, spec: RunSpec) -> RankMemory:
        kinds = memory(self, spec)
        return kinds if next(refused, None) is None else SimpleNamespace(total=2 * self.memory_bytes)  # type: ignore

    monkeypatch.setattr(PlanningProblem, "memory", larger)
    monkeypatch.setattr(searching, "MOST", 3)
    assert search(problem(), 1).plans[0].step.step_s >= best.step.step_s


def test_each_layout_is_tried_once() -> None:
    """3-D on 1 x n x 1 is 1-D with sequence parallelism; of the ways to split over 8 ranks no two are equal."""
    all_of_them = list(tensor_choices(8))
    signatures = [signature(MODES[each.mode].forms[each.form](each.shape)) for each in all_of_them]
    assert len(set(signatures)) == len(signatures)
    assert TensorChoice("1d", "sequence_parallel", (8,)) in all_of_them
    assert TensorChoice("3d", "heads", (1, 8, 1)) not in all_of_them
    assert TensorChoice("3d", "heads", (2, 2, 2)) in all_of_them


def test_axes_that_only_split_the_batch_are_data_parallelism() -> None:
    """2.5-D is 2-D with data-parallel layers of ranks, so that its depth is not tried, not even alone."""
    assert not [each for each in tensor_choices(8) if each.mode == "2.5d"]
    alone = [each for each in tensor_choices(8, ["2.5d"]) if each.size > 1]
    assert {each.shape for each in alone if each.size == 4} == {(1, 1, 4), (1, 2, 2), (1, 4, 1)}
    assert {each.mode for each in alone} == {"2.5d"}
    fixed = FixedKeys((("parallel.tensor_parallel_mode", "2.5d"), ("parallel.tensor_model_parallel_size", 4)))
    assert search(replace(problem(), fixed=fixed), 1).plans[0].layout.tensor.mode == "2.5d"


def test_step_times_within_one_percent_share_a_place() -> None:
    assert places([1.0, 1.005, 1.01, 1.011, 1.02, 1.03]) == [1, 1, 1, 4, 4, 6]


def test_long_sequences_are_split_over_context_ranks() -> None:
    """Context ranks take parts of a sequence that does not fit one rank; short sequences are left whole."""
    assert context_sizes(8, 8192) == [1] and context_sizes(8, 65536) == [1, 2, 4, 8] == [*context_sizes(8, 2**20)]
    assert context_sizes(6, 32768) == [1, 2]
    model = {**MODEL, "family": "llama", "seq_length": 131072, "max_position_embeddings": 131072}
    train = {"global_batch_size": 8, "precision": "bf16"}
    here = PlanningProblem(Config.model_validate({"model": model, "train": train}), 8192, "perlmutter", 8)
    alone = TensorChoice("1d", "replicated", (1,))
    whole, split = (here.plan(LayoutChoice(alone, zero_stage=1, context=ContextChoice(size))) for size in (1, 8))
    assert "CP 8 all_gather" in str(split.layout) and check(split.config, 8, 8192) == []
    assert split.memory.categories["activations"] < 0.25 * whole.memory.categories["activations"]
    bounds = {bound.layout.context for bound in in_order(list(layout_groups(here, Counter[str](), ["1d"])))}
    assert {each.exchange for each in bounds if each.size == 8} == {*CONTEXT_EXCHANGES}
    assert ContextChoice(8, "a2a+p2p", (4, 2)) in bounds  # heads move within a node of 4


def test_context_ranks_are_chosen_for_long_sequences_only() -> None:
    """One sequence of 131,072 positions in a step is divided among ranks, 16 of 8,192 are not."""
    found = {}
    for length, sequences in ((131072, 1), (8192, 16)):
        model = {**MODEL, "family": "llama", "seq_length": length, "max_position_embeddings": length}
        train = {"global_batch_size": sequences, "precision": "bf16"}
        here = PlanningProblem(Config.model_validate({"model": model, "train": train}), 8192, "perlmutter", 8)
        (best,) = search(here, 1, ["1d"]).plans
        found[length] = best.layout.context
        assert tool.layout_of(best.config).context == best.layout.context
    assert found[131072].size > 1 and found[8192] == ContextChoice()


def test_layouts_that_differ_to_no_purpose_are_left_out() -> None:
    """ZB-2P is ZB-H2 on two ranks; recomputation must save memory, or it only takes time."""
    alone = TensorChoice("1d", "replicated", (1,))
    first, same, other = (problem().plan(LayoutChoice(alone, 2, name, 1, 1)) for name in ("zb-h2", "zb-2p", "1f1b"))
    assert (same.step.step_s, same.total_bytes) == (first.step.step_s, first.total_bytes)
    assert worth_showing([other, first, same]) == [first, other]
    again = replace(
        first,
        layout=replace(first.layout, recompute="selective"),
        step=replace(first.step, step_s=1.001 * first.step.step_s),
    )
    assert worth_showing([again, first]) == [first]
    smaller = replace(again, library_bytes=again.library_bytes - int(0.02 * again.total_bytes))
    assert worth_showing([smaller, first]) == [first, smaller]
    assert worth_showing([again, same]) == [same, again]  # of another schedule


def test_too_large_a_model_is_refused_with_reasons() -> None:
    large = {**MODEL, "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}
    config = Config.model_validate({"model": large, "train": {"global_batch_size": 8, "precision": "bf16"}})
    with pytest.raises(UserError, match=r"no layout of this model fits; use more GPUs.*more memory"):
        search(PlanningProblem(config, 8192, "perlmutter", 4))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    lines = ["model:", *(f"  {name}: {value}" for name, value in MODEL.items())]
    path = tmp_path / "model.yaml"
    path.write_text("\n".join([*lines, "train:", "  global_batch_size: 8", "  precision: bf16", ""]), encoding="utf-8")
    return path


def test_the_tool_writes_a_valid_configuration(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = config_file.with_name("layout.yaml"), config_file.with_name("bars.png")
    words = ["--config", str(config_file), *ARGUMENTS, "--output", str(out), "--picture", str(picture), "--top", "3"]
    assert tool.main(words) == 0
    assert "MFU" in capsys.readouterr().out and picture.stat().st_size > 10_000
    chosen = resolve(out, (), 8, elsewhere=True).config
    assert tool.layout_of(chosen) == found().plans[0].layout
    assert tool.main(["--compare", str(out), str(config_file), *ARGUMENTS]) == 0
    assert "times as fast as the first" in capsys.readouterr().out
    assert tool.main(["--config", str(out), "--explain", *ARGUMENTS]) == 0
    assert f"{found().plans[0].step.step_s:.3f} s" in capsys.readouterr().out


def test_the_written_layout_trains(tmp_path: Path, pool: Pool) -> None:
    out = tmp_path / "layout.yaml"
    words = [
        "--config",
        str(write_config(tmp_path)),
        "--cluster",
        "perlmutter",
        "--world-size",
        "4",
        "--vocab-size",
        "257",
    ]
    assert tool.main([*words, "--output", str(out), "train.precision=fp32"]) == 0
    assert pool.run(run_as_rank, 4, out, [["train.train_iters=3"]]) == [[0]] * 4
    assert [iteration for iteration, *_ in steps(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_the_tool_draws_the_speed_over_ranks(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number of ranks has the speed of its best layout; the error names a number for which none fits."""
    picture = config_file.with_name("scaling.svg")
    words = ["--config", str(config_file), *ARGUMENTS, "--modes", "1d", "--picture", str(picture)]
    assert tool.main([*words, "--scale", "4", "8", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if "per rank %" in line)
    rows = {int(ranks): (speed, share) for ranks, speed, share in map(str.split, lines[at + 1 : at + 4])}
    whole = problem()
    assert rows[8][0] == f"{whole.tokens_per_s(search(whole, 1, ('1d',)).plans[0]):,.0f}"
    assert rows[4][1] == "100.0" and list(rows) == [4, 8, 16]
    assert picture.read_text(encoding="utf-8").count('<g id="axes_') == 2
    assert tool.main([*words, "model.num_layers=100", "--scale", "1", "--overwrite"]) == 2
    assert "--scale 1, where train.global_batch_size is 1: " in capsys.readouterr().err


def test_no_other_order_of_the_mesh_is_faster() -> None:
    """GPT-3 on 1024 A100: tensor axes innermost, then data, then pipeline; some orders take 1.33 times as long."""
    model = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048, "vocab_size": 51200}
    config = Config.model_validate({"model": model, "train": {"global_batch_size": 1536, "precision": "bf16"}})
    here = PlanningProblem(config, 51200, "selene", 1024)
    layout = LayoutChoice(TensorChoice("1d", "sequence_parallel", (4,)), 8, "1f1b", 1, 1, 2)
    step = simulated_step(here.spec(layout.apply_to(config)), here.machine)
    found = {
        order: step_time(replace(step, local=replace(step.local, mesh=Mesh(order)))).step_s
        for order in permutations(step.mesh.axes)
    }
    assert found[step.mesh.axes] <= 1.001 * min(found.values())
    assert max(found.values()) > 1.33 * found[step.mesh.axes]


def test_the_tool_reports_missing_arguments(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--cluster", "nowhere", "--world-size", "8", "--config", str(config_file)]) == 2
    assert "cluster nowhere: there is none" in capsys.readouterr().err
    assert tool.main([*ARGUMENTS]) == 2
    assert "--config: missing" in capsys.readouterr().err
    assert tool.main([*ARGUMENTS, "--config", str(config_file), "--vocab-size", "9000"]) == 2
    assert "model.vocab_size=8192: less than the tokenizer's 9000 tokens" in capsys.readouterr().err
    assert tool.main([*ARGUMENTS, "--config", str(config_file), "model.vocab_size=null"]) == 2
    assert "--vocab-size" in capsys.readouterr().err


def test_tokens_of_ramped_batches_are_counted_exactly(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(config_file), "--explain", *ARGUMENTS, "train.train_iters=10"]
    assert tool.main([*words, "parallel.tensor_model_parallel_size=8"]) == 0
    assert f"\n{10 * 8 * 2048:,} tokens: " in (said := capsys.readouterr().out) and "shorter batches" not in said
    growing = ["train.rampup_batch_size=[4,4,12]", "train.seq_length_warmup=[1024,1024,8]"]
    assert tool.main([*words, "parallel.tensor_model_parallel_size=8", *growing]) == 0
    said = capsys.readouterr().out
    assert f"\n{8 * 1024 + 4 * 2048 + 7 * 8 * 2048:,} tokens: " in said
    assert f"the first 3 iterations, {8 * 1024 + 4 * 2048:,} tokens, have smaller or shorter batches" in said


def test_a_layout_survives_writing_and_reading() -> None:
    layout = LayoutChoice(TensorChoice("3d", "heads", (1, 2, 2)), 2, "interleaved", 2, 1, 1, "full")
    plan: PredictedLayout = problem().plan(layout)
    assert tool.layout_of(plan.config) == layout
    assert str(layout) == "3d heads x1·y2·z2, PP 2 interleaved v2, ZeRO 1, microbatch 1, recompute full"
