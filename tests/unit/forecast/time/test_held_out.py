"""Fact: held-out published runs are predicted within stated bounds, which docs/validation.md repeats.

Constants fitted to one half of a table predict the other half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from megatron3d.forecast.search.options import LayoutChoice, TensorChoice
from megatron3d.forecast.time import step as steps
from megatron3d.forecast.time.hardware import Accelerator, load_accelerator
from megatron3d.forecast.time.layer import layer_times
from megatron3d.forecast.time.practices import AXONN, MEGATRON_2023, OURS, ExecutionProfile
from tests.unit.forecast.time.held_out import GROUPS, ROWS, TABLES, Beside, beside, step_for
from tests.unit.forecast.time.papers import SHAPES, on_perlmutter, on_v100
from tests.unit.forecast.time.published import core_tflops, read, sc21_tflops

DOCS = (Path(__file__).parents[4] / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()

# Mean and largest error of each group.  FSDP programs also lose time to effects that are not modelled.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "recompute": (0.05, 0.08),
    "zero_bubble": (0.06, 0.11),
    "llama3": (0.05, 0.05),
    "llm.c": (0.06, 0.08),
    "fsdp_a100": (0.18, 0.19),
    "fsdp_h100": (0.10, 0.18),
    "olmo3": (0.17, 0.18),
    "tinyllama": (0.23, 0.23),
    "axonn": (0.14, 0.20),
}


@cache
def results(group: str) -> tuple[Beside, ...]:
    return tuple(beside(row) for row in ROWS if row["group"] == group)


def documented(*cells: str) -> tuple[float, ...]:
    """Return the numbers after the first cells of a line of a table of docs/validation.md."""
    (line,) = (line for line in DOCS if line.startswith(f"| {' | '.join(cells)} |"))
    behind = re.split(r"\s*\|\s*", line)[1 + len(cells) : -1]
    return tuple(float(number) for cell in behind for number in re.findall(r"[-+]?\d+\.?\d*", cell))


@pytest.mark.parametrize("group", BOUNDS)
def test_published_runs_that_set_no_constant(group: str) -> None:
    errors = [abs(each.error) for each in results(group)]
    assert mean(errors) <= BOUNDS[group][0] and max(errors) <= BOUNDS[group][1], results(group)


def test_the_mean_error_of_all_tables() -> None:
    """Half of all errors are within 7 %."""
    assert set(GROUPS) == set(BOUNDS)
    errors = sorted(abs(each.error) for group in BOUNDS for each in results(group))
    assert len(errors) == len(ROWS) >= 36
    assert mean(errors) <= 0.08 and errors[len(errors) // 2] <= 0.07


@pytest.mark.parametrize("group", BOUNDS)
def test_the_page_shows_the_models_predictions(group: str) -> None:
    for each in results(group):
        published, predicted, percent = documented(each.name)
        assert published == pytest.approx(each.published)
        assert predicted == pytest.approx(each.predicted, rel=0.01)
        assert percent == pytest.approx(100 * each.error, abs=0.6)


@pytest.mark.parametrize(
    ("table", "model", "published", "predict"),
    [
        ("megatron_sc21", "params_B", "tflops_per_gpu", sc21_tflops),
        ("megatron_core_h100", "model", "tflops_gpu", core_tflops),
    ],
)
def test_the_page_shows_the_numbers_of_the_fitted_tables(
    table: str, model: str, published: str, predict: Callable[[Any], float]
) -> None:
    for row in read(table)["rows"]:
        name = row[model] if model == "model" else f"{row[model]:g} B"
        told, predicted, _ = documented(name, str(row["gpus"]))
        assert told == pytest.approx(row[published], abs=0.5)
        assert predicted == pytest.approx(predict(row), rel=0.01)


@pytest.mark.parametrize("profile", TABLES["profiles"], ids=lambda profile: str(profile["name"]))
def test_profiled_stages_are_predicted(profile: Mapping[str, Any]) -> None:
    """The weight gradient, and the sum of forward, dgrad and wgrad, are within 5 % of the profile."""
    step = step_for(next(row for row in ROWS if row["name"] == profile["name"]))
    phases = layer_times(step.local, step.machine)
    parts = [3e3 * each.total for each in (phases.forward, phases.input_grad, phases.weight_grad)]
    assert parts[2] == pytest.approx(profile["ms"][2], rel=0.05)
    assert sum(parts) == pytest.approx(sum(profile["ms"]), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_constants_fitted_to_half_a_table_predict_the_other_half(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fraction of A100's peak that fits five rows of the weak scaling best is within 5 % on the other five."""
    rows = read("megatron_sc21")["rows"]
    fitted, others = rows[half::2], rows[1 - half :: 2]

    def errors(some: Sequence[Any], share: float) -> list[float]:
        def load(name: str) -> Accelerator:
            sheet = load_accelerator(name)
            assert sheet.kernels is not None, "load_accelerator gives kernels"
            return sheet.model_copy(update={"kernels": sheet.kernels.model_copy(update={"matmul_fraction": share})})

        monkeypatch.setattr(steps, "load_accelerator", load)
        return [abs(sc21_tflops(row) / row["tflops_per_gpu"] - 1) for row in some]

    best = min((0.70, 0.74, 0.78, 0.82, 0.86), key=lambda share: mean(errors(fitted, share)))
    found = errors(others, best)
    assert mean(found) <= 0.05 and max(found) <= 0.10, (best, found)


SIZES = ((2048, 64), (4096, 64), (4096, 192), (8192, 64), (8192, 192))


@pytest.mark.parametrize(("hidden", "sequences"), SIZES)
def test_modes_on_64_v100(hidden: int, sequences: int) -> None:
    """3-D is faster than 1-D and 2-D at every size, 2.32 and 1.57 times in the paper; the page has our numbers."""
    steps_s, gib = zip(*(on_v100(mode, hidden, sequences) for mode in SHAPES), strict=True)
    one_d, two_d, _, three_d = steps_s
    assert one_d / three_d > 2.32 and 1.1 < two_d / three_d < 1.7
    *told, over_1d, over_2d = documented(str(hidden), str(sequences))
    assert told[::2] == pytest.approx(steps_s, rel=0.02) and told[1::2] == pytest.approx(gib, abs=0.6)
    assert (over_1d, over_2d) == pytest.approx((one_d / three_d, two_d / three_d), rel=0.02)


def one_d(size: int, stages: tuple[int, int], micro_batch: int, recompute: str | None) -> LayoutChoice:
    ranks, virtual = stages
    return LayoutChoice(
        TensorChoice("1d", "sequence_parallel", (size,)), ranks, "interleaved", virtual, 1, micro_batch, recompute
    )


# Named as on the page; the last two are found by the planner.
PERLMUTTER: Mapping[str, tuple[LayoutChoice, ExecutionProfile]] = {
    "AxoNN's: full recomputation, grid 1·2·4": (
        LayoutChoice(
            TensorChoice("grid", "all_reduce", (1, 2, 4)), zero_stage=1, micro_batch_size=16, recompute="full"
        ),
        AXONN,
    ),
    "Megatron-LM of 2023: full recomputation, 1-D + SP 4, PP 4": (one_d(4, (4, 8), 4, "full"), MEGATRON_2023),
    "ours, 1-D + SP 4, PP 4": (one_d(4, (4, 8), 4, None), OURS),
    "ours, 3-D 2·4·1": (
        LayoutChoice(TensorChoice("3d", "heads", (2, 4, 1)), zero_stage=3, micro_batch_size=16),
        OURS,
    ),
}


def test_axonn_on_1024_a100() -> None:
    """AxoNN is faster than Megatron-LM, by 26 % in the paper, and the planner's own choice is faster than both."""
    found = {name: on_perlmutter(*how) for name, how in PERLMUTTER.items()}
    for name, (step_s, mfu) in found.items():
        told_s, told_mfu, *_ = documented(name)
        assert told_s == pytest.approx(step_s, rel=0.01) and told_mfu == pytest.approx(100 * mfu, rel=0.01)
    axonn, megatron, pipelined, cube = (step_s for step_s, _ in found.values())
    assert 1.10 < megatron / axonn < 1.26 and pipelined < cube < axonn
