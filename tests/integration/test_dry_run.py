"""Fact: the dry run of a step performs exactly the FLOPs, collectives and bytes of the closed forms on any rank.

This holds for every mode, schedule, ZeRO stage and recomputation; the members of a group issue matching collectives.
Some cases of each test are dry runs.  The others are steps of a rank that communicates with itself, which perform the
same (tests/unit/comm/test_loopback.py) in an eighth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from common.loopback import LoopbackComm

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES
from megatron3d.comm.recording import Recorder
from megatron3d.config.cli import parse_args
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.experts import grouped_matmul
from megatron3d.forecast.memory.flat_buffers import flat_buffer_sizes
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.time.traffic import step_flops, step_traffic
from megatron3d.parallel.mesh import Link
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.schedules import SCHEDULES
from megatron3d.train.state import build_state, connect
from megatron3d.verify.dry_run import (
    RankDryRun,
    disagreements,
    figure,
    measure_step,
    microbatches,
    run_dry,
    run_rank,
    step_totals,
    with_few_microbatches,
)
from tests.support.tiny_run import write_config

VOCAB_SIZE = 61
EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8, "hidden_dropout": 0.1},
    "llama": {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "kv_channels": 8,
        "seq_length": 8,
    },
    "experts": {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "seq_length": 8,
        "num_moe_experts": 8,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_expert_capacity_factor": 3.0,  # of 8 experts for 3 choices: none is dropped
    },
    "latent": {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "seq_length": 8,
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
    },
}
EVERYTHING = "latent, experts, ahead"


def model_keys(name: str) -> dict[str, Any]:
    return (
        {**MODELS["experts"], **MODELS["latent"], "mtp_num_layers": 1, "num_layers": 2, "attention_output_gate": True}
        if name == EVERYTHING
        else MODELS[name]
    )


def configure(model: str, parallel: dict[str, Any], world_size: int, **train: Any) -> Config:
    train = {"micro_batch_size": 8, "precision": "bf16", "loss_chunk_tokens": 12, "bucket_mb": 0.01, **train}
    config = Config.model_validate({"model": model_keys(model), "parallel": parallel, "train": train})
    assert check(config, world_size, VOCAB_SIZE) == []
    return config


def step_of(config: Config, world_size: int, rank: int) -> StepSpec:
    return make_step_spec(RunSpec(config, world_size, VOCAB_SIZE, rank))


Documents = tuple[tuple[int, ...], ...]


def run_with_values(spec: RunSpec, is_logged: bool) -> RankDryRun:
    """Return one measured step, with values, of a rank that communicates with itself."""
    recorder = Recorder(LoopbackComm(spec.mesh))
    state = build_state(spec, recorder, torch.device("cpu"))
    return measure_step(state, recorder, microbatches(spec), is_logged)


def problems(
    config: Config,
    world_size: int,
    ranks: tuple[int, ...],
    documents: Documents | None = None,
    *,
    is_dry: bool = True,
    is_logged: bool = False,
) -> list[str]:
    """Return the differences between a dry run, or a step with values, and the closed forms."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, documents=documents)
    lists, found, runs = lower(spec.schedule), list[str](), []
    for rank in ranks:
        run = (run_rank if is_dry else run_with_values)(with_few_microbatches(spec).on_rank(rank), is_logged)
        runs.append(run)
        dry, step = step_totals(run, lists[run.coord]), make_step_spec(spec.on_rank(rank))
        expected = step_traffic(step, is_logged)
        for key in sorted({*dry.calls, *expected.calls}):
            got = dry.calls.get(key, 0), dry.sent.get(key, 0.0)
            want = expected.calls.get(key, 0), expected.sent.get(key, 0.0)
            if got[0] != want[0] or abs(got[1] - want[1]) > 1e-6 * max(want[1], 1.0):
                found.append(f"rank {rank} {key}: dry {got}, closed form {want}")
        if dry.flops != step_flops(step):
            found.append(f"rank {rank}: dry {dry.flops} operations, closed form {step_flops(step)}")
    return found + disagreements(runs, spec.parallel_state)


@pytest.mark.parametrize(("place", "mode", "form"), [(place, *each) for place, each in enumerate(EVERY_FORM)])
def test_every_mode(place: int, mode: str, form: str) -> None:
    """Check every mode on 2 x 2 x 8 ranks, cycling through schedules and ZeRO stages, with both model families."""
    schedule = list(SCHEDULES)[place % len(SCHEDULES)]
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_model_parallel_size": 8}
    pipeline = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule, "zero_stage": place % 3}
    config = configure(("gpt2", "llama")[place % 2], parallel | pipeline, 32, global_batch_size=96)
    assert problems(config, 32, (0, 21)) == []


@pytest.mark.parametrize("place", [1, 3, 6, 7, 8])
def test_latent_attention(place: int) -> None:
    """Check the latents' plan and norms, and the rotary key, where axes split tokens, features, or copy them."""
    mode, form = EVERY_FORM[place]
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_model_parallel_size": 8}
    recompute = FROM_LATENTS if place in (3, 7) else [{}, *RECOMPUTATIONS.values()][place % 5]
    keys = parallel | {"tp_keep_gathered_weights": place == 7}
    config = configure("latent", keys | {"zero_stage": place % 3}, 16, global_batch_size=48, **recompute)
    assert problems(config, 16, (11,), is_dry=place == 1) == []


@pytest.mark.parametrize(("mode", "recompute"), [("1d", "full"), ("3d", "core")])
def test_latents_with_experts_and_modules_ahead(mode: str, recompute: str) -> None:
    parallel = {"tensor_parallel_mode": mode, "tensor_model_parallel_size": 8, "sequence_parallel": mode == "1d"}
    pipeline = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "zero_stage": 1}
    keys = parallel | pipeline
    config = configure(EVERYTHING, keys, 32, global_batch_size=32, **RECOMPUTATIONS[recompute])
    assert problems(config, 32, (0, 21)) == []


FROM_LATENTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}
RECOMPUTATIONS = {
    "core": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
    "runs": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


MLPS = {
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
}


@pytest.mark.parametrize("recompute", [*RECOMPUTATIONS, *MLPS])
@pytest.mark.parametrize("mode", MODES)
def test_recomputation(recompute: str, mode: str) -> None:
    parallel = {"tensor_parallel_mode": mode, "tensor_model_parallel_size": 8, "tp_keep_gathered_weights": mode == "3d"}
    model = "llama" if mode == "1d" else "gpt2"
    config = configure(model, parallel, 8, global_batch_size=40, **(RECOMPUTATIONS | MLPS)[recompute])
    assert problems(config, 8, (5,), is_dry=(recompute, mode) == ("block", "1d")) == []


@pytest.mark.parametrize("together", [2, 4])
def test_zero_3_gathers_all_but_the_last_two_layers_recomputed_together_again(together: int) -> None:
    recompute = {"recompute_granularity": "full", "recompute_num_layers": together}
    config = configure("llama", {"zero_stage": 3}, 2, global_batch_size=32, **recompute)
    assert problems(config, 2, (1,), is_dry=False) == []


EXCHANGE = {"moe_token_dispatcher_type": "alltoall"}
OF_EXPERTS = {
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "shared_experts"]},
}


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        (
            {"zero_stage": 3, "num_distributed_optimizer_instances": 2, **EXCHANGE, "expert_model_parallel_size": 2},
            None,
        ),
        ({**EXCHANGE, "expert_model_parallel_size": 4}, "runs"),
        ({"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}, "full"),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}, "core"),
        ({"expert_model_parallel_size": 2, **EXCHANGE, "zero_stage": 2}, "runs"),
        ({"expert_tensor_parallel_size": 2, "zero_stage": 3}, "full"),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2},
            "block",
        ),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, **EXCHANGE}, "moe"),
        ({"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}, "moe"),
        ({"pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, "moe"),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}, "parts"),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, **EXCHANGE, "zero_stage": 3}, "parts"),
    ],
)
def test_experts(parallel: dict[str, Any], recompute: str | None) -> None:
    """Check the relayout to whole rows, counts of sequences, and the GEMMs of balanced experts."""
    config = configure(
        "experts", parallel, 4, global_batch_size=32, **(RECOMPUTATIONS | OF_EXPERTS).get(recompute or "", {})
    )
    assert problems(config, 4, (0, 3)) == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_model_parallel_size": 4, **EXCHANGE},
        {"context_parallel_size": 2, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ],
)
def test_padded_experts(parallel: dict[str, Any]) -> None:
    """Check the GEMMs of experts that are padded to what they take of all sequences of their group."""
    given = {"model": {**MODELS["experts"], "moe_pad_expert_input_to_capacity": True}, "parallel": parallel}
    config = Config.model_validate(given | {"train": {"micro_batch_size": 8, "global_batch_size": 32}})
    assert check(config, 4, VOCAB_SIZE) == []
    assert problems(config, 4, (0, 3)) == []


COUNTING: dict[str, tuple[dict[str, Any], bool]] = {
    "bias": ({"moe_router_enable_expert_bias": True, "mtp_num_layers": 1}, False),
    "load of the step before": ({"moe_router_load_balancing_type": "global_aux_loss"}, False),
    "metrics": ({}, True),
}


@pytest.mark.parametrize("name", COUNTING)
def test_counts_of_routers(name: str) -> None:
    """All ranks sum what every router counted: where the next step needs it, and where metrics do."""
    model, is_logged = COUNTING[name]
    parallel = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    train = {"micro_batch_size": 8, "global_batch_size": 32, "precision": "bf16", "loss_chunk_tokens": 12}
    given = {"model": {**MODELS["experts"], **model}, "parallel": parallel, "train": train}
    assert problems(Config.model_validate(given), 4, (0, 3), is_logged=is_logged) == []


@pytest.mark.parametrize(("recompute", "zero_stage"), [(None, 0), ("core", 1), ("full", 3)])
def test_context(recompute: str | None, zero_stage: int) -> None:
    """Check the exchange of keys and values, the scores of a rank's chunks, and ZeRO over data and context ranks."""
    parallel = {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "zero_stage": zero_stage}
    train = RECOMPUTATIONS[recompute] if recompute else {}
    config = configure("llama" if zero_stage else "gpt2", parallel, 16, global_batch_size=48, **train)
    assert problems(config, 16, (0, 13), is_dry=zero_stage == 3) == []


DOCUMENTS = ((3, 7, 40), (), (33, 34, 35, 36, 60), (20,))


@pytest.mark.parametrize(
    ("exchange", "mean_length", "balancer"),
    [
        (None, None, "zigzag"),
        ("all_gather", 13, "documents"),
        ("p2p", None, "zigzag"),
        ("p2p", None, "documents"),
        ("a2a", 13, "zigzag"),
        ("a2a+p2p", None, "documents"),
    ],
)
def test_documents(exchange: str | None, mean_length: int | None, balancer: str) -> None:
    """FLOPs and traffic are those of the documents, of one length or as a corpus has them, in windows too."""
    parallel: dict[str, Any] = {"tensor_model_parallel_size": 2, "zero_stage": 1}
    if exchange:
        parallel |= {"context_parallel_size": 4, "cp_comm_type": exchange, "context_parallel_load_balancer": balancer}
        parallel |= {"hierarchical_context_parallel_sizes": (2, 2)} if exchange == BOTH else {}
    model = {**MODELS["llama"], "num_layers": 2, "seq_length": 64, "window_size": (9, 0), "window_attn_skip_freq": 2}
    train = {"micro_batch_size": 4, "global_batch_size": 16, "precision": "bf16"}
    data = {"reset_attention_mask": True, "mean_document_length": mean_length}
    config = Config.model_validate({"model": model, "parallel": parallel, "train": train, "data": data})
    world_size = 8 if exchange else 2
    assert check(config, world_size, VOCAB_SIZE) == []
    assert problems(config, world_size, (1,), DOCUMENTS, is_dry=mean_length is not None) == []


# Options that change queries and keys, or the inputs of experts, element by element.
BETWEEN: Mapping[str, dict[str, Any]] = {
    "clip": {"clip_qkv": 0.5},
    "inputs of experts times their weights": {**MODELS["experts"], "moe_apply_probs_on_input": True},
    "norms without weights": {"qk_l2_norm": True},
    "factors of queries": {"attention_temperature_beta": 0.5, "attention_temperature_length": 2},
    "norms behind RoPE": {"qk_layernorm": True, "qk_layernorm_after_rope": True},
}


@pytest.mark.parametrize("recompute", [None, "core"])
@pytest.mark.parametrize("option", BETWEEN)
def test_options_between_linears(option: str, recompute: str | None) -> None:
    """Alone and on context ranks, with tensors kept and with the core recomputed."""
    recomputed: Any = RECOMPUTATIONS[recompute] if recompute else {}
    train = {"micro_batch_size": 4, "precision": "bf16", **recomputed}
    for context, world_size in ((1, 2), (2, 4)):
        parallel = {"tensor_model_parallel_size": 2, "context_parallel_size": context}
        given = {"model": {**MODELS["llama"], **BETWEEN[option]}, "parallel": parallel, "train": train}
        config = Config.model_validate(given)
        assert check(config, world_size, VOCAB_SIZE) == []
        assert problems(config, world_size, (0, world_size - 1)) == []


@pytest.mark.parametrize("exchange", [None, "p2p"])
def test_capped_scores_and_sinks(exchange: str | None) -> None:
    """Capped scores are computed in pieces of 1,024 queries, of which causal ones see fewer keys."""
    parallel: dict[str, Any] = {"tensor_model_parallel_size": 2, "zero_stage": 1}
    parallel |= {"context_parallel_size": 2, "cp_comm_type": exchange} if exchange else {}
    model = {**MODELS["llama"], "num_layers": 2, "seq_length": 4096, "attention_softcap": 2.0}
    model |= {"softmax_type": "learnable", "use_parallel_residual": True}
    train = {"micro_batch_size": 1, "global_batch_size": 8, "precision": "bf16"}
    config = Config.model_validate({"model": model, "parallel": parallel, "train": train})
    assert problems(config, 8, (0, 5)) == []


@pytest.mark.parametrize(
    ("model", "parallel", "num_ranks", "recompute"),
    [
        ("gpt2", {"tensor_parallel_mode": "1d", "tensor_parallel_form": "sequence_parallel"}, 4, "core"),
        ("llama", {"tensor_parallel_mode": "3d", "tensor_parallel_form": "tokens"}, 8, "full"),
        ("llama", {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "zero_stage": 3}, 4, None),
        ("gpt2", {"pipeline_model_parallel_size": 2, "zero_stage": 3}, 4, None),
    ],
)
def test_multi_token_prediction(
    model: str, parallel: dict[str, Any], num_ranks: int, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two modules on the last stage: linears, the change of layout, embedding and LM head again, shared matrices."""
    monkeypatch.setitem(MODELS[model], "mtp_num_layers", 2)
    size = {} if "zero_stage" in parallel else {"tensor_model_parallel_size": num_ranks}
    train = RECOMPUTATIONS[recompute] if recompute else {}
    config = configure(model, parallel | size, num_ranks, global_batch_size=48, **train)
    assert problems(config, num_ranks, (0, num_ranks - 1), is_dry=recompute == "core") == []


WINDOWS: dict[str, dict[str, Any]] = {
    "all layers": {"window_size": (4, 0)},
    "every second layer": {"window_size": (8, 0), "window_attn_skip_freq": 2},
}


@pytest.mark.parametrize(
    ("exchange", "windows"), [*zip(CONTEXT_EXCHANGES, list(WINDOWS) * 2, strict=True), ("p2p", "all layers")]
)
def test_windows(exchange: str, windows: str) -> None:
    """A window leaves out pairs, and steps of a ring; documents that begin nowhere change nothing."""
    parallel: dict[str, Any] = {"context_parallel_size": 8, "cp_comm_type": exchange, "tensor_model_parallel_size": 2}
    parallel |= {"hierarchical_context_parallel_sizes": (2, 4)} if exchange == BOTH else {}
    train = RECOMPUTATIONS["core"] if windows == "all layers" else {}
    config = configure("llama", {}, 32, global_batch_size=256, **train)
    heads = {"num_attention_heads": 16, "num_query_groups": 4, "seq_length": 64}
    model = config.model.model_copy(update=WINDOWS[windows] | heads)
    data = config.data.model_copy(update={"reset_attention_mask": windows == "all layers"})
    layout = config.parallel.model_copy(update=parallel)
    config = config.model_copy(update={"model": model, "data": data, "parallel": layout})
    assert check(config, 32, VOCAB_SIZE) == []
    assert problems(config, 32, (0, 13), is_dry=(exchange, windows) == ("p2p", "all layers")) == []
    whole = step_of(config.model_copy(update={"model": model.model_copy(update={"window_size": None})}), 32, 13)
    assert step_flops(step_of(config, 32, 13)) < step_flops(whole)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_windows_of_one_rank(dropout: float) -> None:
    """Dropout of attention weights computes all scores, and masks them."""
    config = configure("llama", {}, 1, global_batch_size=16)
    model = config.model.model_copy(update={"window_size": (2, 0), "attention_dropout": dropout})
    assert problems(config.model_copy(update={"model": model}), 1, (0,), is_dry=dropout > 0) == []


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_zero(zero_stage: int, schedule: str) -> None:
    """Check HSDP, and gradients reduced in bf16."""
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule, "zero_stage": zero_stage}
    groups = {"num_distributed_optimizer_instances": 2}
    train = {"global_batch_size": 48, "micro_batch_size": 1, "grad_reduce_in_bf16": True}
    config = configure("gpt2" if zero_stage % 2 else "llama", parallel | groups, 16, **train)
    assert problems(config, 16, (0, 15), is_dry=(zero_stage, schedule) == (3, "1f1b")) == []


@pytest.mark.parametrize("mode", ["2d", "3d"])
def test_weight_gradients_reduced_in_bf16(mode: str) -> None:
    """Half the bytes over tensor axes, of linears and of the head."""
    parallel = {"tensor_parallel_mode": mode, "tensor_model_parallel_size": 8}
    configs = [configure("llama", parallel, 8, global_batch_size=16, tp_grad_reduce_in_bf16=on) for on in (True, False)]
    assert problems(configs[0], 8, (5,), is_dry=False) == []
    sent = [sum(step_traffic(step_of(config, 8, 5)).sent.values()) for config in configs]
    assert sent[0] < sent[1]


def test_kept_weights_in_a_pipeline() -> None:
    """Kept weights are gathered for the first of the microbatches in flight, and again once none is in flight."""
    parallel = {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8, "tp_keep_gathered_weights": True}
    config = configure("gpt2", parallel | {"pipeline_model_parallel_size": 4}, 32, global_batch_size=80)
    assert problems(config, 32, (0, 8, 31), is_dry=False) == []


@pytest.mark.parametrize(
    ("mode", "form", "schedule", "overlaps_dx"),
    [
        ("1d", "sequence_parallel", "zb-h1", True),
        ("3d", "tokens", "1f1b", False),
        ("2.5d", "weight_stationary", "zb-v", True),
    ],
)
def test_collectives_in_rounds(mode: str, form: str, schedule: str, overlaps_dx: bool) -> None:
    """The dry run names them, with the bytes of the plain collectives; split backwards reduce dX in rounds."""
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_model_parallel_size": 8}
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_input_grad": overlaps_dx}
    pipeline = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule}
    config = configure("llama", parallel | overlap | pipeline, 16, global_batch_size=48)
    assert problems(config, 16, (0, 13), is_dry=mode == "3d") == []
    assert {"all_gather_matmul", "matmul_reduce_scatter"} & {
        name for name, _ in step_traffic(step_of(config, 16, 0)).calls
    }


def runs_of(world_size: int) -> tuple[RunSpec, list[RankDryRun]]:
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = configure("gpt2", parallel, world_size, global_batch_size=32)
    spec = RunSpec(config, world_size, VOCAB_SIZE)
    return spec, [run_rank(with_few_microbatches(spec).on_rank(rank)) for rank in range(world_size)]


def test_a_rank_that_calls_another_collective_is_reported() -> None:
    """A different shape, a missing collective, and two swapped transfers are each reported."""
    spec, runs = runs_of(8)
    assert disagreements(runs, spec.parallel_state) == []
    entries = list(runs[1].entries)
    along_t = next(index for index, entry in enumerate(entries) if entry.where == ("t",))
    runs[1].entries[along_t] = entries[along_t]._replace(shape=(1, 2))
    (problem,) = disagreements(runs, spec.parallel_state)
    assert problem.startswith("ranks 0 and 1 would hang: call 1 between them is") and "(1, 2)" in problem
    del runs[1].entries[along_t]
    assert any("would hang" in problem for problem in disagreements(runs, spec.parallel_state))
    runs[1].entries[:] = entries
    links = [index for index, entry in enumerate(entries) if isinstance(entry.where, Link)]
    first, second = next(pair for pair in pairwise(links) if entries[pair[0]].what != entries[pair[1]].what)
    runs[1].entries[first], runs[1].entries[second] = entries[second], entries[first]
    assert any("ranks 1 and 5 would hang" in problem for problem in disagreements(runs, spec.parallel_state))


def test_memory_and_flops_equal_those_of_a_step_with_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one process: parameters, gradients and optimizer agree to the byte, the peak within 2 %."""
    monkeypatch.setattr(grouped_matmul, "padded", lambda rows: rows)  # zeros have no FLOPs of the model
    for model in MODELS:
        for extra in ({}, {"recompute_granularity": "full"}):
            config = configure(model, {}, 1, global_batch_size=24, **extra)
            spec = RunSpec(config, 1, VOCAB_SIZE)
            lists, recorder = lower(spec.schedule), Recorder(connect(spec))
            state = build_state(spec, recorder, torch.device("cpu"))
            real = measure_step(state, recorder, microbatches(spec))
            dry = run_rank(with_few_microbatches(spec))
            one, other = step_totals(dry, lists[0]), step_totals(real, lists[0])
            assert dry.between == real.between and dry.parameters == real.parameters
            assert one.flops == other.flops
            assert one.peak == pytest.approx(other.peak, rel=0.02)


def test_sharded_gradients_live_as_in_a_real_step() -> None:
    """Those of the step before are gone when it begins; what a reduction sends is in memory until it is over."""
    config = configure("gpt2", {"zero_stage": 2}, 2, global_batch_size=32, bucket_mb=1.0)
    spec = RunSpec(config, 2, VOCAB_SIZE)
    run = run_rank(with_few_microbatches(spec))
    gradients = run.between["gradients"]
    (_, before), *_ = run.actions
    assert -gradients <= before.kept < -0.9 * gradients
    backward = next(counts for action, counts in run.actions if action is not None and action.kind is ActionKind.B)
    sent = max(flat.size for flat in flat_buffer_sizes(make_step_spec(spec))) * make_step_spec(spec).local.wide
    forward = next(counts for action, counts in run.actions if action is not None and action.kind is ActionKind.F)
    assert backward.kept > sent - forward.kept, "the last reduction of the backward is in flight"


def test_microbatches_in_the_middle_are_extrapolated() -> None:
    """Four simulated microbatches predict the totals, and the bytes after every action, of running all of them."""
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"}
    config = configure("gpt2", parallel, 4, global_batch_size=72)
    spec = RunSpec(config, 4, VOCAB_SIZE)
    lists = lower(spec.schedule)
    for rank in (0, 3):
        few, all_of_them = (
            step_totals(run_rank(each.on_rank(rank)), lists[rank // 2]) for each in (with_few_microbatches(spec), spec)
        )
        assert few.calls == all_of_them.calls and few.sent == all_of_them.sent and few.flops == all_of_them.flops
        assert few.peak == pytest.approx(all_of_them.peak, rel=0.02)


def test_the_plot_shows_the_memory_by_kind() -> None:
    """Persistent memory and activations add up to the timeline; the line on top ends at the peak."""
    spec, runs = runs_of(4)
    lists = lower(spec.schedule)
    sums = [step_totals(run, lists[run.coord]) for run in runs]
    (panel, *rest) = figure(runs, sums).axes
    assert len(rest) == len(runs) - 1
    (line,) = panel.lines
    top, size = list(line.get_ydata()), sums[0].peak / max(line.get_ydata())  # type: ignore[operator, type-var]
    assert top == pytest.approx([peak / size for peak in sums[0].peaks])
    highest = max(y for area in panel.collections for path in area.get_paths() for _, y in path.vertices)  # type: ignore[misc, str-unpack, type-var, union-attr]
    assert highest == pytest.approx(max(sums[0].timeline) / size, rel=1e-6)


def test_the_command_simulates_all_ranks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each of 8 ranks is run and agrees with the others; ranks with equal pipeline coordinates are alike."""
    overrides = ["parallel.tensor_parallel_mode=2d", "parallel.tensor_model_parallel_size=4"]
    overrides += ["parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=2"]
    words = ["--config", str(write_config(tmp_path)), "--dry-run", "--world-size", "8", "--ranks", "all"]
    assert run_dry(parse_args([*words, *overrides]), 1) == 0
    out, _ = capfd.readouterr()
    assert "8 ranks agree" in out
    rows = [line.split()[1:] for line in out.splitlines() if line[1:].lstrip()[:1].isdigit()]
    assert [row[0] for row in rows[:8]] == [str(rank) for rank in range(8)]
    assert len({tuple(row[1:]) for row in rows[:8]}) == 2


def test_command_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def dry(*words: str) -> int:
        arguments = ("--config", "configs/gpt3-175b.yaml", "--dry-run", "--world-size", "64", *words)
        return run_dry(
            parse_args(
                [
                    *arguments,
                    "model.num_layers=8",
                    "parallel.virtual_pipeline_model_parallel_size=null",
                    "parallel.pipeline_schedule=1f1b",
                    "train.global_batch_size=64",
                ]
            ),
            1,
        )

    picture = tmp_path / "memory.svg"
    assert dry("--ranks", "0,8", "--picture", str(picture)) == 0
    out, _ = capfd.readouterr()
    assert "all_reduce  pipeline·t" in out and "2 ranks agree" in out and "drew" in out
    assert picture.read_text(encoding="utf-8").count('<g id="axes_') == 2
    with pytest.raises(UserError, match=r"--picture .*use a file such as memory.svg in a folder that exists"):
        dry("--ranks", "0", "--picture", str(tmp_path / "none" / "memory.svg"))
    with pytest.raises(UserError, match="--ranks 0,64: must be pipeline, all, or ranks of 0 to 63"):
        dry("--ranks", "0,64")
