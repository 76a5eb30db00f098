"""Fact: steps with fp8 linears are predicted by the kernels that a device has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config.read import read_config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.forecast.memory.step_spec import local_sizes
from megatron3d.forecast.search.bounds import in_order, layout_groups
from megatron3d.forecast.search.options import LayoutChoice, TensorChoice
from megatron3d.forecast.search.problem import PlanningProblem, read_fixed
from megatron3d.forecast.search.search import search
from megatron3d.forecast.time.data_axis import data_axis_time
from megatron3d.forecast.time.hardware import DeviceModel, device_model, load_accelerator
from megatron3d.forecast.time.layer import TimedTasks
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.forecast.time.tasks import (
    ACCUMULATION,
    DGRAD,
    FORWARD,
    GEMM,
    MOVED,
    QUANTIZATION,
    SCALES,
    WGRAD,
    GemmKind,
)
from megatron3d.linear.fp8_plan import CAPABILITIES, RECIPES, has_kernel
from megatron3d.linear.scaled_mm import KERNELS
from megatron3d.model.operations import layer_operations

LLAMA_8B = Path("configs/llama-8b.yaml")
VOCAB_SIZE = 128_256


def problem(cluster: str = "eos", *overrides: str) -> PlanningProblem:
    """Return the 8B on 64 GPUs of a cluster."""
    config = read_config(LLAMA_8B, list(overrides)).config
    return PlanningProblem(config, VOCAB_SIZE, cluster, 64)


def fp8(recipe: str) -> tuple[str, str]:
    return "train.fp8=e4m3", f"train.fp8_recipe={recipe}"


def step_s(cluster: str = "eos", *overrides: str) -> float:
    here = problem(cluster, *overrides)
    return here.step(here.spec(here.config)).step_s


def device(name: str) -> DeviceModel:
    return device_model(load_accelerator(name).today, "bf16", 2)


def test_blockwise_is_faster_on_hopper() -> None:
    """torchao's tensorwise recipe is 1.25 times as fast as bf16 on 8 H100 (pytorch.org, 2024)."""
    assert 1.1 < step_s() / step_s("eos", *fp8("blockwise")) < 1.5


def test_devices_without_a_kernel_restore_their_operands() -> None:
    """A100 has no fp8, and Hopper none for blocks of 32; values of other scales than powers of 2 need fp32."""
    assert step_s("selene", *fp8("blockwise")) > 1.2 * step_s("selene")
    assert step_s("eos", *fp8("mxfp8")) > 1.2 * step_s("eos")
    assert step_s("selene", *fp8("tensorwise")) > 3 * step_s("selene", *fp8("rowwise"))


def test_gemms_run_at_the_peak_of_their_operands() -> None:
    """The rates that were measured on H100: 1,117 to 1,330 TFLOP/s (benchmarks/results/h100.jsonl)."""
    h100 = device("h100_sxm").as_kind(GemmKind.FP8)
    for (m, k, n), tflops in (((8192, 8192, 8192), 1330), ((8192, 2048, 8192), 1210), ((8192, 4096, 14336), 1300)):
        assert 2e-12 * m * n * k / h100.gemm_s(m, n, k) == pytest.approx(tflops, rel=0.1)
    a100 = device("a100")
    size = 8192
    wide, native = (a100.as_kind(kind).gemm_s(size, size, size) for kind in (GemmKind.WIDE, GemmKind.NATIVE))
    assert wide / native == pytest.approx(312 / 19.5, rel=0.05)


def test_capabilities_are_those_of_the_kernels() -> None:
    firsts = {name: min(each.capabilities[0] for each in KERNELS if each.recipe_name == name) for name in RECIPES}
    assert firsts == dict(CAPABILITIES)
    assert has_kernel("blockwise", (9, 0), "bf16") and not has_kernel("blockwise", (8, 9), "bf16")
    assert not has_kernel("blockwise", (9, 0), "fp16") and not has_kernel("blockwise", None, "bf16")


def tasks_of(*overrides: str) -> TimedTasks:
    here = problem("eos", *overrides)
    spec, machine = here.spec(here.config), load_machine("eos", "bf16", 64)
    local = local_sizes(spec, machine.kernels_of(spec))
    return TimedTasks.of(layer_operations(local), local, machine)


def test_tasks_of_a_linear() -> None:
    """Blocks are found in one pass, X and its transpose together; dW is read and added in fp32."""
    of_blocks, of_rows = tasks_of(*fp8("blockwise")), tasks_of(*fp8("rowwise"))
    tokens, hidden, ffn = 8192, 4096, 2 * 14336 // 8
    forward, backward = (
        task.size for task in of_blocks.tasks if (task.operation, task.what) == ("mlp.fc1", QUANTIZATION)
    )
    x, w, y = tokens // 8 * hidden, hidden * ffn, tokens * ffn
    assert forward == pytest.approx(x * (2 + 1 + 4 / 128) + w * (2 + 1) + x * (1 + 4 / 128), rel=0.001)
    assert backward == pytest.approx(w * (2 + 1) + y * (2 + 1 + 4 / 128) + y * (1 + 1 + 4 / 128), rel=0.001)
    kinds = {task.kind for task in of_blocks.tasks if task.what == GEMM}
    assert kinds == {GemmKind.FP8}
    reduced = Counter(len(task.calls) for task in of_rows.tasks if task.what == SCALES)
    assert reduced and not [task for task in of_blocks.tasks if task.what == SCALES]
    (added,) = (task for task in of_blocks.tasks if (task.operation, task.what) == ("mlp.fc1", "accumulation"))
    assert added.size * added.accesses == 12 * w and not added.behind


ALONE = ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false", "parallel.zero_stage=3")


def test_compiled_graphs_quantize_x_and_dy() -> None:
    """Where no axis splits linears; W is quantized outside, by torch's operations: 8 accesses of each value."""
    tokens, hidden, ffn = 8192, 4096, 2 * 14336
    x, w, y = tokens * hidden, hidden * ffn, tokens * ffn
    traced = 2 * 2 + 2 + 2  # two reads in bf16, both forms, and a transposed copy
    for recipe, of_w in (("tensorwise", 8 * 4), ("rowwise", 8 * 2), ("blockwise", 2 + 1)):
        tasks = [task for task in tasks_of(*fp8(recipe), *ALONE).tasks if task.operation == "mlp.fc1"]
        sizes = [task.size for task in tasks if task.what == QUANTIZATION]
        assert sizes == pytest.approx([x * traced + w * of_w, y * traced + w * of_w], rel=0.02)
    eager = [task.size for task in tasks_of(*fp8("rowwise"), *ALONE, "train.compile=false").tasks if task.size]
    assert 2 * 8 * (2 * x + w) in eager


def test_compiled_recipes_of_rows_and_tensors_are_faster_than_bf16() -> None:
    """Linears of tensor ranks stay out of compiled graphs, where these recipes take longer than bf16."""
    plain, alone = step_s(), step_s("eos", *ALONE)
    for recipe in ("tensorwise", "rowwise"):
        assert step_s("eos", *fp8(recipe), *ALONE) < alone
        assert step_s("eos", *fp8(recipe)) > plain


def test_bounds_are_those_of_the_faster_quantization() -> None:
    """A split backward keeps linears out of compiled graphs: blocks are quantized faster, rows slower."""
    alone = TensorChoice("1d", "replicated", (1,))
    for recipe in ("blockwise", "rowwise"):
        here = problem("eos", *fp8(recipe), *ALONE, "model.num_layers=8")
        fixed = read_fixed(["tensor_model_parallel_size=1", "pipeline_model_parallel_size=2", "zero_stage=1"])
        groups = list(layout_groups(replace(here, fixed=fixed), Counter[str](), ["1d"]))
        bounds = {bound.layout: bound.seconds for bound in in_order(groups)}
        for schedule in ("1f1b", "zb-h1"):
            layout = LayoutChoice(alone, 2, schedule, zero_stage=1)
            assert 0.75 * here.plan(layout).step.step_s < bounds[layout] < here.plan(layout).step.step_s


def test_weights_that_are_stored_in_fp8_are_quantized_once_per_step() -> None:
    """Microbatches only transpose W, reading and writing a byte per element; data ranks all-gather half the bytes."""
    tasks = tasks_of(*fp8("blockwise"), "train.fp8_param_gather=true").tasks
    tokens, hidden, ffn = 8192, 4096, 2 * 14336 // 8
    forward, backward = (task.size for task in tasks if (task.operation, task.what) == ("mlp.fc1", QUANTIZATION))
    x, w, y = tokens // 8 * hidden, hidden * ffn, tokens * ffn
    assert forward == pytest.approx(x * (2 + 1 + 4 / 128) + x * (1 + 4 / 128), rel=0.001)
    assert backward == pytest.approx(2 * w + y * (2 + 1 + 4 / 128) + y * (1 + 1 + 4 / 128), rel=0.001)
    plain, stored = (
        simulated_step(here.spec(here.config), load_machine("eos", "bf16", 64))
        for here in (problem("eos", *fp8("blockwise"), *more) for more in ((), ("train.fp8_param_gather=true",)))
    )
    stages, others = stored.pipeline.stages, plain.stored_counts(plain.pipeline.stages)
    held, narrow = stored.param_counts(stages), stored.stored_counts(stages)
    assert sum(narrow.values()) == 32 * hidden * (6144 + hidden + 3 * 14336) // 8
    wide_s, narrow_s = (
        data_axis_time(held, stored.mesh, stored.machine, 1, (1, 1), 1e9, stored=each).gathers.total
        for each in (others, narrow)
    )
    assert narrow_s / wide_s == pytest.approx(1 - sum(narrow.values()) / sum(held.values()) / 2, rel=0.01)


EXPERTS, TOPK, FFN = 64, 8, 1024
MIXTURE = (
    *("model.num_layers=2", "model.hidden_size=2048", f"model.moe_ffn_hidden_size={FFN}", "model.seq_length=4096"),
    *(f"model.num_moe_experts={EXPERTS}", f"model.moe_router_topk={TOPK}", "parallel.expert_model_parallel_size=8"),
    *("parallel.moe_token_dispatcher_type=alltoall", *ALONE[:2], "parallel.zero_stage=1"),
    "parallel.expert_load_imbalance=1",
)


def rows_moved(*overrides: str) -> Mapping[tuple[str, str, str], float]:
    """Return the bytes of kernels of experts by linear, kernel and phases."""
    moved = Counter[tuple[str, str, str]]()
    for task in tasks_of(*MIXTURE, *overrides).tasks:
        if task.operation in ("mlp.experts.fc1", "mlp.experts.fc2") and task.size:
            name = task.operation[-3:], task.what, task.phases
            moved[name] += round(task.size * task.accesses * task.repeats)
    return moved


def test_rows_of_experts_are_quantized_once_and_matrices_by_expert() -> None:
    """X of fc1 is quantized where tokens are at home, and packed there; dW restores X by torch's operations."""
    tokens, hidden, own = 4096, 2048, EXPERTS // 8
    rows, w = tokens * TOPK, own * 2 * FFN * hidden
    data = 1 + 4 / 128
    moved = rows_moved(*fp8("blockwise"))
    expected = {
        ("fc1", QUANTIZATION, FORWARD): tokens * hidden * (2 + data) + w * (2 + 1),
        ("fc1", QUANTIZATION, DGRAD): rows * 2 * FFN * (2 + data) + w * (2 + 1),
        ("fc1", QUANTIZATION, WGRAD): rows * hidden * 4 * 6,
        ("fc1", MOVED, FORWARD): rows * 2 * FFN * 2 * 2 + 2 * (tokens + rows) * hidden * data,
        ("fc1", MOVED, DGRAD): rows * hidden * 2 * 2,
        ("fc1", ACCUMULATION, WGRAD): 10 * w,
        ("fc2", QUANTIZATION, FORWARD): rows * FFN * (2 + data) + w / 2 * (2 + 1),
        ("fc2", QUANTIZATION, DGRAD): rows * hidden * (2 + data) + w / 2 * (2 + 1),
        ("fc2", QUANTIZATION, WGRAD): rows * FFN * 4 * 6,
        ("fc2", MOVED, FORWARD): rows * hidden * 2 * 2,
        ("fc2", MOVED, DGRAD): rows * FFN * 2 * 2,
        ("fc2", ACCUMULATION, WGRAD): 10 * w / 2,
    }
    assert moved == pytest.approx(expected, rel=0.001)
    stored = rows_moved(*fp8("blockwise"), "train.fp8_param_gather=true")
    assert moved["fc1", QUANTIZATION, FORWARD] - stored["fc1", QUANTIZATION, FORWARD] == pytest.approx(3 * w, rel=0.001)
    assert moved["fc1", QUANTIZATION, DGRAD] - stored["fc1", QUANTIZATION, DGRAD] == pytest.approx(w, rel=0.001)
    of_rows = rows_moved(*fp8("rowwise"))
    assert of_rows["fc2", QUANTIZATION, FORWARD] == pytest.approx(8 * 2 * (rows * FFN + w / 2), rel=0.001)


def test_gemms_of_experts_are_a_loop_over_them() -> None:
    """One kernel multiplies all experts in bf16; in fp8 each has its own, and dW stays in bf16."""
    for overrides, kinds, batch in (
        ((), [GemmKind.NATIVE] * 3, EXPERTS // 8),
        (fp8("blockwise"), [GemmKind.FP8, GemmKind.FP8, GemmKind.NATIVE], 1),
    ):
        found = [task for task in tasks_of(*MIXTURE, *overrides).tasks if task.operation == "mlp.experts.fc1"]
        gemms = [task for task in found if task.gemm]
        assert [task.kind for task in gemms] == kinds
        assert {task.gemm.batch for task in gemms if task.gemm} == {batch}
        assert {task.repeats for task in gemms} == {EXPERTS // 8 // batch}
    plain = step_s("eos", *MIXTURE)
    assert plain < step_s("eos", *MIXTURE, *fp8("rowwise")) and step_s("eos", *MIXTURE, *fp8("blockwise")) < 2 * plain
    left_out = "train.fp8_exclude=['*.mlp.experts.*']"
    assert step_s("eos", *MIXTURE, *fp8("blockwise"), left_out) < plain


def test_layouts_that_cut_blocks_are_not_offered() -> None:
    """Four ranks have 192 of 768 features each, which is no multiple of 128."""
    sizes = {"hidden_size": 768, "ffn_hidden_size": 2048, "num_attention_heads": 12, "num_query_groups": 12}
    keys = [f"model.{name}={size}" for name, size in {**sizes, "num_layers": 4, "seq_length": 1024}.items()]
    keys.append("train.global_batch_size=64")
    configs = [read_config(LLAMA_8B, [*keys, *more]).config for more in ((), fp8("blockwise"))]
    for ranks, is_cut in ((4, True), (2, False)):
        fixed = read_fixed(["pipeline_model_parallel_size=1", f"tensor_model_parallel_size={ranks}", "zero_stage=1"])
        plain, blockwise = (PlanningProblem(config, 1024, "eos", 8, fixed=fixed) for config in configs)
        assert search(plain, 1, ["1d"]).plans
        if is_cut:
            with pytest.raises(UserError, match="tensor_model_parallel_size"):
                search(blockwise, 1, ["1d"])
        else:
            (best,) = search(blockwise, 1, ["1d"]).plans
            assert check(best.config, 8, 1024) == [] and best.config.train.fp8 == "e4m3"
