"""Run a configuration on several ranks and compare it with one process, in float64.

The comparison covers losses, gradient norms, gradients, parameters and the validation loss of one or two steps.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples, StepTrace, differences, trace
from tests.support.turn_ranks import connect

CPU = torch.device("cpu")
VOCAB_SIZE = 61
TOLERANCE = 1e-10
NUM_STEPS = 2
NUM_RANKS = 8
# Global batches in sequences: powers of 2, and sizes that are not a multiple of four pipeline ranks.
BATCHES = ((4, 8, 16), (6, 12))

TRAIN = {"precision": "fp64", "loss_chunk_tokens": 12, "bucket_mb": 0.01}
# Adam, SOAP and Lion multiply the rounding of gradients that are zero but for it by lr / eps: 1e4 here, 1e6 by default.
OPTIMIZER = {"lr": 1e-2, "clip_grad": 0.5, "lr_warmup_iters": 1, "adam_eps": 1e-6, "lion_eps": 1e-6, "ema_decay": 0.8}
# Parameters of all models that are updated otherwise.
GROUP = {"params": ["embedding.*", "*.attention.proj.*"], "lr_mult": 0.5, "wd_mult": 2.0}
# Update rules, by the name of a row's.
RULES: Mapping[str, Mapping[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon"},
    "soap": {"optimizer": "soap"},
    "adam in groups": {"optimizer": "adam", "param_groups": [GROUP]},
    "muon in groups": {
        "optimizer": "muon",
        "param_groups": [GROUP, {"params": "*.fc2.*", "optimizer": "adam"}],
        "muon_max_home_elements": 2500,  # some are divided
        "qk_clip": True,
        "qk_clip_threshold": 0.01,
    },
    "soap in groups": {"optimizer": "soap", "param_groups": [GROUP]},
}
SMALL = {"num_layers": 2, "hidden_size": 48, "seq_length": 8, "kv_channels": 8, "make_vocab_size_divisible_by": 1}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2, tied, dropout": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 8,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "attention_softcap": 0.7,
        "softmax_type": "learnable",
    },
    "SmolLM3's layers, untied, grouped queries, xIELU": {
        **SMALL,
        "num_layers": 3,
        "family": "llama",
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 40,
        "no_rope_freq": 3,
        "qk_l2_norm": True,
        "attention_temperature_beta": 0.9,
        "attention_temperature_length": 2,
        "attention_temperature_offset": 1,
        "attention_temperature_layers": "no_rope",
        "mtp_num_layers": 2,
        "activation": "xielu",
    },
    "fewer key/value heads than ranks, QK-norm, tied": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "qk_layernorm": True,
        "tie_embeddings": True,
        "qk_layernorm_scope": "projection",
        "clip_qkv": 0.3,
        "norm_placement": "post",
        "attention_output_gate": True,
        "add_qkv_bias": True,
        "logit_softcap": 0.2,
        "mtp_num_layers": 1,
        "activation": "clamped_swiglu",
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "experts, shared experts, losses of routers": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 40,
        "num_moe_experts": 8,
        "moe_layer_freq": (0, 1),
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.3,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_expert_capacity_factor": 1.2,
        "hidden_dropout": 0.1,
        "mtp_num_layers": 1,
    },
    "uneven groups, each default of the family reversed": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 24,
        "num_query_groups": 3,
        "ffn_hidden_size": 24,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "geglu",
        "tie_embeddings": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.2,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "add_mlp_bias": False,
        "embedding_scale": 3.0,
        "residual_scale": 0.7,
        "softmax_scale": 0.2,
        "logit_scale": 0.5,
        "mup_base_hidden_size": 16,
        "rotary_percent": 0.5,
        "no_rope_freq": 2,
        "attention_softcap": 0.3,
        "window_size": (2, 0),
        "window_attn_skip_freq": (0, 1),
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "Gemma 3's layers": {
        **SMALL,
        "num_layers": 3,
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 40,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
        "activation": "geglu_tanh",
        "embedding_scale": 7.0,
        "softmax_scale": 0.25,
        "window_size": (2, 0),
        "window_attn_skip_freq": 3,
        "rotary_base": 500.0,
        "rope_local_base_freq": 20.0,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 8.0,
        "tie_embeddings": True,
    },
    "gpt-oss's layers, Cohere's norms": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 16,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "add_bias_linear": True,
        "activation": "clamped_swiglu",
        "softmax_type": "learnable",
        "use_parallel_residual": True,
        "norm_placement": "shared",
        "normalization": "BiaslessLayerNorm",
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": (0, 1),
        "moe_router_bias": True,
        "moe_apply_probs_on_input": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.7,
        "window_size": (2, 0),
        "window_attn_skip_freq": (1, 0),
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "OLMo 3's layers": {
        **SMALL,
        "num_layers": 3,
        "family": "llama",
        "num_attention_heads": 8,
        "ffn_hidden_size": 40,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "window_size": (2, 0),
        "window_attn_skip_freq": 3,
        "rotary_base": 500.0,
        "rope_local_base_freq": 500.0,
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "Nemotron's norms and MLP, GPT-NeoX's residual": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "ffn_hidden_size": 40,
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "activation": "squared_relu",
        "clip_qkv": 0.1,
        "attention_temperature_beta": 0.7,
        "attention_temperature_length": 3,
        "add_bias_linear": True,
        "rotary_percent": 0.5,
        "use_parallel_residual": True,
        "rotary_scaling": "longrope",
        "original_max_position_embeddings": 4,
        "rotary_short_factor": (1.0, 1.5),
        "rotary_long_factor": (1.25, 4.0),
        "max_position_embeddings": 16,
    },
}
# Families whose attention other models have as well, so that they need not meet every exchange with documents.
SIMILAR_ATTENTION = frozenset({"OLMo 3's layers", "Nemotron's norms and MLP, GPT-NeoX's residual"})
# Documents packed into sequences, about four in each.
PACKED: Mapping[str, Any] = {"reset_attention_mask": True, "mean_document_length": 2}
DOCUMENTS: Mapping[str, dict[str, Any]] = {
    "one": {},
    "positions restart": {**PACKED, "reset_position_ids": True, "eod_mask_loss": True},
    "positions go on": {**PACKED},
}
DOCUMENT_KEYS = frozenset(key for keys in DOCUMENTS.values() for key in keys)
# Latent attention, which rows of its own compare.
LATENT_MODELS: Mapping[str, Mapping[str, Any]] = {
    "latent attention": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "kv_channels": None,
        "ffn_hidden_size": 40,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
    },
    "latent attention, queries without latent, each default reversed": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 8,
        "kv_channels": None,
        "ffn_hidden_size": 24,
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 18,
        "rotary_interleaved": True,
        "normalization": "PlainLayerNorm",
        "softmax_scale": 0.2,
        "attention_output_gate": True,
        "window_size": (2, 0),
        "window_attn_skip_freq": (0, 1),
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "latent attention, experts, two modules ahead": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "kv_channels": None,
        "ffn_hidden_size": 40,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
        "attention_softcap": 1.5,
        "softmax_type": "learnable",
        "num_moe_experts": 8,
        "moe_layer_freq": (0, 1),
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "mtp_num_layers": 2,
    },
}
RECOMPUTATIONS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "attention core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "attention core and activation": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp_act"],
    },
    "every two layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "first layer": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
# Of models with norms of inputs.
OF_NORMS: Mapping[str, dict[str, Any]] = {
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]},
}
# Of models with dense layers, with experts, and with shared ones.
OF_DENSE: Mapping[str, dict[str, Any]] = {
    "whole MLP": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
OF_EXPERTS: Mapping[str, dict[str, Any]] = {
    "mixture of experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
OF_SHARED: Mapping[str, dict[str, Any]] = {
    "parts of a mixture": {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "shared_experts"]},
}
NO_OVERLAP = {f"tp_comm_overlap_{what}": False for what in ("input_grad", "weight_grad", "weight_gather")}
OVERLAPS: Mapping[str, dict[str, Any]] = {
    "all": {},
    "in rounds with the GEMM": {"tp_comm_overlap": True},
    "gathered weights kept": {"tp_keep_gathered_weights": True},
    "gathered weights kept, nothing else": {"tp_keep_gathered_weights": True, **NO_OVERLAP},
}
FORMS = [(mode, form) for mode, entry in MODES.items() for form in entry.forms]
# Every schedule with one to three stages per rank where it supports them, and one schedule from a file.
SCHEDULES_WITH_STAGES: list[tuple[str, int | None]] = [
    *((name, v) for name, entry in SCHEDULES.items() for v in range(1, 4) if entry.supports(v)),
    (FROM_FILE, None),
]


def shapes(num_axes: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the factorizations of a power of 2 over the axes in which at most one axis, or as few as possible, is 1."""
    num_ones = max(1, num_axes - num_ranks.bit_length() + 1)
    for shape in product(*[[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]] * num_axes):
        if math.prod(shape) == num_ranks and shape.count(1) <= num_ones:
            yield shape


def tensor_keys(form: tuple[str, str], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the keys of section `parallel` for a mode and form with the given axis sizes."""
    return {"tensor_parallel_mode": form[0], "tensor_parallel_form": form[1], "tensor_parallel_shape": shape}


def configure(
    model: Mapping[str, Any], parallel: Mapping[str, Any], documents: str = "one", rule: str = "adam", /, **train: Any
) -> Config:
    """Return a float64 configuration with the settings that all comparisons share."""
    sections = {"model": model, "parallel": parallel, "data": DOCUMENTS[documents]}
    clips = {} if not {"qk_layernorm", "qk_l2_norm"} & model.keys() else {"qk_clip": False}
    return Config.model_validate(
        {**sections, "train": TRAIN | train, "optimizer": {**OPTIMIZER, **RULES[rule], **clips}}
    )


def rule_in(config: Config) -> str:
    """Return the name of a configuration's update rule."""
    found = {name: configure({"qk_layernorm": True}, {}, "one", name).optimizer for name in RULES}
    plain = config.optimizer.model_copy(update={"qk_clip": False})
    return next(name for name, optimizer in found.items() if optimizer == plain)


def small_batches(name: str, parallel: Mapping[str, Any], num_ranks: int, batches: Sequence[int], least: int) -> Config:
    """Return the valid configuration with the fewest microbatches per global batch, but at least `least`.

    Time goes by microbatches: on two cores a step mostly waits for its collectives.  Raises AssertionError where none
    fits.
    """
    fitting = []
    for micro, batch in product((1, 2, 4, 8), batches):
        config = configure(MODELS[name], parallel, micro_batch_size=micro, global_batch_size=batch)
        count = RunSpec(config, num_ranks).num_microbatches
        if count >= least and not check(config, num_ranks, VOCAB_SIZE):
            fitting.append((count, micro, config))
    assert fitting, f"no batch of {batches} fits {parallel}"
    return min(fitting, key=lambda each: each[:2])[2]


@cache
def smallest_microbatch(form: tuple[str, str], shape: tuple[int, ...]) -> int:
    """Return the smallest number of sequences per microbatch that the rules allow for these tensor axes."""
    for micro in (1, 2, 4, 8):
        train = {"micro_batch_size": micro, "global_batch_size": micro}
        config = configure(next(iter(MODELS.values())), tensor_keys(form, shape), **train)
        if not check(config, math.prod(shape), VOCAB_SIZE):
            return micro
    raise AssertionError(f"no microbatch fits {form} {shape}")


def run_trace(rank: int, world_size: int, config: Config, num_steps: int = NUM_STEPS) -> StepTrace | None:
    """Return the trace of a configuration on rank 0, None elsewhere."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), num_steps)


def run_trace_and_skip(rank: int, world_size: int, config: Config) -> tuple[StepTrace | None, list[str]]:
    """Return the trace of a run that skips an update after its first step, and the problems that this rank found.

    A skipped update must leave nothing behind, so that the trace is that of a run that skips none.
    """
    spec, problems = RunSpec(config, world_size, VOCAB_SIZE, rank), list[str]()

    def after_step(state: TrainState) -> None:
        problems.extend(skip_problems(state) if state.iteration == 1 else ())

    return trace(spec, connect(spec), NUM_STEPS, after_step), problems


def skip_problems(state: TrainState) -> Iterator[str]:
    """Train a step with an infinite gradient on the last rank, then go back; yield each violated expectation."""
    spec, train, mesh = state.spec, state.spec.config.train, state.model.comm.mesh
    samples, batch = RandomSamples(train.seed, spec.arch.vocab_size, spec.arch.seq_length), train.global_batch_size
    loader = BatchLoader(samples, mesh, spec.mode.batch_axes, train.micro_batch_size, batch, CPU)
    settings = StepSettings(train.seed, batch * spec.arch.seq_length, batch)
    before, iteration, consumed_samples = updated_values(state), state.iteration, state.consumed_samples
    with contextlib.ExitStack() as stack:
        if mesh.rank == mesh.world_size - 1:
            named = state.model.named_parameters()
            plain = next(param for name, param in named if "norm" in name or "bias" in name)
            hook = plain.register_hook(lambda grad: grad / 0)
            stack.callback(hook.remove)
        result = train_step(state, loader.step(consumed_samples), 1e-2, settings)
    if not result.skipped:
        yield f"rank {mesh.rank}: an infinite gradient did not skip the update"
    if not torch.equal(before, updated_values(state)):
        yield f"rank {mesh.rank}: a skipped update changed parameters"
    state.iteration, state.consumed_samples = iteration, consumed_samples


def updated_values(state: TrainState) -> Tensor:
    """Return all parameters that a rank updates and their moving averages, concatenated."""
    averages = [shard.values for shard in state.optimizer.averages]
    return torch.cat([*(values.flatten().clone() for _, _, values in state.buffers.shards("main")), *averages])


@cache
def reference(
    name: str,
    num_layers: int,
    batch: int,
    num_steps: int = NUM_STEPS,
    documents: str = "one",
    rule: str = "adam",
) -> StepTrace:
    """Return the trace of one process that computes the global batch in one microbatch."""
    model = {**{**MODELS, **LATENT_MODELS}[name], "num_layers": num_layers}
    config = configure(model, {}, documents, rule, micro_batch_size=batch, global_batch_size=batch)
    values = run_trace(0, 1, config, num_steps)
    assert values is not None, "one process is rank 0"
    return values


def wrong(cases: Sequence[tuple[str, Config]], traces: Sequence[StepTrace], num_steps: int = NUM_STEPS) -> str:
    """Return the first differences from one process for each model and configuration, one line each."""
    lines = []
    for (name, config), got in zip(cases, traces, strict=True):
        documents = next(each for each, keys in DOCUMENTS.items() if keys == given_documents(config))
        size = config.model.num_layers, config.train.global_batch_size
        expected = reference(name, *size, num_steps, documents, rule_in(config))
        lines += [f"{describe(config)}: {line}" for line in list(differences(expected, got, TOLERANCE))[:3]]
    return "\n".join(lines)


def given_documents(config: Config) -> dict[str, Any]:
    """Return the keys of a configuration's documents, one of the values of `DOCUMENTS`."""
    return {key: value for key, value in config.data.model_dump().items() if key in DOCUMENT_KEYS and value}


def describe(config: Config) -> str:
    """Return a description of a configuration: its tensor axes, then its other choices."""
    tensor = [f"tensor_parallel_{key}" for key in ("mode", "form", "shape")]
    given = config.parallel.model_dump(exclude_defaults=True, exclude={*tensor})
    mode = " ".join(str(getattr(config.parallel, key)) for key in tensor)
    packed = ", ".join(given_documents(config))
    others = f"{rule_in(config)} micro-batch {config.train.micro_batch_size}"
    return f"{mode} {given or ''} {packed} {others}"


def divisions(where: Sequence[int], num_layers: int, choose: random.Random) -> dict[str, list[int] | None]:
    """Return divisions of the layers among the stages owned by the ranks `where`; None divides them by cost."""
    stages = range(len(where))

    def random_division(stages: Sequence[int]) -> list[int]:
        inner = set(where) - {where[0], where[-1]}  # ranks that hold no parameters unless they get a layer
        chosen = [choose.choice([stage for stage in stages if where[stage] == rank]) for rank in inner]
        chosen += choose.choices(stages, k=num_layers - len(chosen))
        return [chosen.count(stage) for stage in range(len(where))]

    return {
        "by cost": None if len(where) <= num_layers else random_division(stages),
        "none on the first stage": random_division(stages[1:]),
        "random": random_division(stages),
        "none on the last stage": random_division(stages[:-1]),
    }


def random_owners(ranks: int, choose: random.Random) -> list[int]:
    """Return random owner ranks for stages, two more stages than ranks."""
    where = [*range(ranks), *choose.choices(range(ranks), k=2)]
    choose.shuffle(where)
    return where
