"""Fact: keys of a feature that is off change nothing and are named in one line, as are iterations that a run lacks."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.remarks import FEATURES, remarks
from megatron3d.config.validate.rules import check
from megatron3d.config.yaml_origins import show
from tests.support.valid_config import with_changes

# Another value than the default of each key of a feature.
VALUES: dict[str, Any] = {
    "train.loss_scale": 128.0,
    "train.initial_loss_scale": 4.0,
    "train.min_loss_scale": 8.0,
    "train.loss_scale_window": 5,
    "train.hysteresis": 3,
    "train.manual_gc_interval": 7,
    "train.fp8_recipe": "rowwise",
    "train.num_layers_at_start_in_bf16": 1,
    "train.num_layers_at_end_in_bf16": 1,
    "train.fp8_exclude": ("*.attention.proj",),
    "train.fp8_param_gather": True,
    "logging.fp8_stats_interval": 5,
    "logging.fp8_loss_interval": 5,
    "train.tp_grad_reduce_in_bf16": True,
    "train.recompute_modules": ("mlp_act",),
    "train.recompute_method": "block",
    "train.recompute_num_layers": 2,
    "parallel.tp_comm_overlap": True,
    "parallel.tp_keep_gathered_weights": True,
    "parallel.expert_load_imbalance": 1.5,
    "parallel.moe_token_dispatcher_type": "alltoall",
    "optimizer.lr_warmup_init": 1e-5,
    "train.eval_ema_weights": False,
    "logging.noise_scale_batch_size": 3,
    "optimizer.lr_wsd_decay_iters": 70,
    "optimizer.lr_wsd_decay_samples": 70,
    "optimizer.lr_wsd_decay_style": "cosine",
    "checkpoint.save_interval": 4,
    "checkpoint.non_persistent_save_interval": 4,
    "checkpoint.keep_latest_k": 1,
    "checkpoint.save_retain_interval": 6,
    "checkpoint.keep_best": True,
    "checkpoint.async_save": True,
    "checkpoint.in_memory_interval": 5,
    "logging.wandb_name": "mine",
    "logging.wandb_mode": "offline",
    "logging.record_memory_history": True,
    "data.mean_document_length": 3,
    "data.goldfish_h": 4,
    "data.stream_key": "content",
    "data.stream_lanes": 4,
    "data.stream_shuffle_rows": 10,
    "data.on_bad_record": "skip",
    "model.moe_router_topk": 300,
    "model.moe_ffn_hidden_size": 8,
    "model.moe_shared_expert_intermediate_size": 8,
    "model.moe_shared_expert_gate": True,
    "model.moe_layer_freq": 3,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_pre_softmax": True,
    "model.moe_router_bias": True,
    "model.moe_router_num_groups": 2,
    "model.moe_router_group_topk": 3,
    "model.moe_router_group_score_topk": 1,
    "model.moe_router_topk_scaling_factor": 2.5,
    "model.moe_apply_probs_on_input": True,
    "model.moe_router_load_balancing_type": "seq_aux_loss",
    "model.moe_router_enable_expert_bias": True,
    "model.moe_router_bias_update_rate": 0.1,
    "model.moe_expert_capacity_factor": 1.0,
    "model.moe_token_drop_policy": "position",
    "model.moe_pad_expert_input_to_capacity": True,
    "model.moe_router_force_load_balancing": True,
    "model.moe_aux_loss_coeff": 0.01,
    "model.moe_z_loss_coeff": 0.01,
}
KEYS = {key: feature for feature in FEATURES for key in feature.keys}


def said(changes: dict[str, Any]) -> list[str]:
    """Return the remarks on a valid configuration with some changes, which must stay valid."""
    config = with_changes(changes)
    assert check(config, 1, vocab_size=61) == []
    return list(remarks(Facts(config, 1, 61)))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_feature_that_is_off_is_named_and_changes_nothing(key: str) -> None:
    section, name = key.split(".")
    changes = {section: {name: VALUES[key]}}
    assert said(changes) == [f"no effect in this run: {key}={show(VALUES[key])} without {KEYS[key].needs}"]
    plain, spec = RunSpec(with_changes({}), 1, 61), RunSpec(with_changes(changes), 1, 61)
    for derived in ("arch", "mode", "mesh", "sizes", "parallel_state", "packing_identity", "narrow_wgrad"):
        assert getattr(spec, derived) == getattr(plain, derived), derived


def test_all_of_them_are_one_line() -> None:
    changes: dict[str, dict[str, Any]] = {}
    for key, value in VALUES.items():
        section, name = key.split(".")
        changes.setdefault(section, {})[name] = value
    (line,) = said(changes)
    assert all(f"{key}={show(value)}" in line for key, value in VALUES.items()) and VALUES.keys() == KEYS.keys()


def test_a_short_trial_of_a_long_run_is_no_problem() -> None:
    end = "the run ends at train.train_iters=10"
    assert said({"optimizer": {"lr_warmup_iters": 20, "lr": 0.1}}) == [
        f"optimizer.lr_warmup_iters=20: {end}, when the learning rate is 0.05 of optimizer.lr=0.1"
    ]
    assert said({"optimizer": {"lr_decay_style": "WSD", "lr_warmup_iters": 4, "lr_wsd_decay_iters": 7}}) == [
        f"optimizer.lr_wsd_decay_iters=7: {end}, so that only the last part of this phase is left"
    ]
    samples = {"train": {"train_iters": None, "train_samples": 90}}
    assert said({**samples, "optimizer": {"lr_warmup_fraction": 0.5, "lr_decay_samples": 360, "lr": 0.1}}) == [
        "optimizer.lr_warmup_fraction=0.5: the run ends at train.train_samples=90, when the learning rate is 0.05 of "
        "optimizer.lr=0.1"
    ]
    assert said({**samples, "logging": {"trace_iterations": [12]}, "checkpoint": {"save": "x"}}) == [
        "logging.trace_iterations=[12]: the run ends at train.train_samples=90, iteration 11, before 12"
    ]
    logging = {"trace_iterations": [3, 12], "profile": True, "profile_step_start": 11, "profile_step_end": 13}
    assert said({"logging": logging, "checkpoint": {"save": "x"}}) == [
        f"logging.trace_iterations=[3,12]: {end}, before 12",
        f"logging.profile_step_start=11: {end}, before 11",
    ]


def test_checkpoints_to_retain_that_are_not_saved() -> None:
    assert said({"checkpoint": {"save": "x", "save_interval": 4, "save_retain_interval": 6}}) == [
        "checkpoint.save_retain_interval=6: not a multiple of checkpoint.save_interval=4, so that some checkpoints to "
        "retain are never saved; use for example 8"
    ]
