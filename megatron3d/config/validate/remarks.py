"""Remarks on a valid configuration: keys without effect in this run, in one line with what each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron3d.config.schema import ModelConfig
from megatron3d.config.validate.facts import Facts, plain
from megatron3d.data.corpus.plan import is_streamed
from megatron3d.data.option_table import HF_PREFIX

DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
SAVING = (
    "save_interval",
    "non_persistent_save_interval",
    "keep_latest_k",
    "save_retain_interval",
    "keep_best",
    "async_save",
)
FP8_KEYS = (
    "fp8_recipe",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "fp8_exclude",
    "fp8_param_gather",
)
FP8_LOGGING = ("fp8_stats_interval", "fp8_loss_interval")
STREAMING = ("stream_key", "stream_lanes", "stream_shuffle_rows", "on_bad_record")
# Value of train.recompute_granularity that each key belongs to.
RECOMPUTE_KEYS = {"recompute_modules": "selective", "recompute_method": "full", "recompute_num_layers": "full"}


@dataclass(frozen=True)
class Feature:
    """A feature, by the key that turns it on, and the keys that have no effect while it is off."""

    needs: str
    is_on: Callable[[Facts], bool]
    keys: tuple[str, ...]


def _streams(facts: Facts) -> bool:
    data = facts.config.data
    return any(path and is_streamed(path) for path in (data.train_data_path, data.valid_data_path))


def _in(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


# Turning a feature off is a way to look for an error, so that its other keys may stay in the file.
FEATURES: tuple[Feature, ...] = (
    Feature(
        "train.precision=fp16",
        lambda facts: facts.config.train.precision == "fp16",
        _in("train", "loss_scale", *DYNAMIC),
    ),
    Feature(
        "parallel.tensor_model_parallel_size above 1",
        lambda facts: facts.spec.tensor_size > 1,
        ("parallel.tp_comm_overlap", "parallel.tp_keep_gathered_weights", "train.tp_grad_reduce_in_bf16"),
    ),
    Feature(
        "train.fp8",
        lambda facts: facts.config.train.fp8 is not None,
        (*_in("train", *FP8_KEYS), *_in("logging", *FP8_LOGGING)),
    ),
    Feature("train.manual_gc", lambda facts: facts.config.train.manual_gc, ("train.manual_gc_interval",)),
    Feature(
        "train.recompute_granularity",
        lambda facts: facts.config.train.recompute_granularity is not None,
        _in("train", *RECOMPUTE_KEYS),
    ),
    Feature(
        "optimizer.lr_decay_style=WSD",
        lambda facts: facts.config.optimizer.lr_decay_style == "WSD",
        _in("optimizer", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
    ),
    Feature(
        "optimizer.ema_decay",
        lambda facts: facts.config.optimizer.ema_decay is not None,
        ("train.eval_ema_weights",),
    ),
    Feature(
        "a warm-up of the learning rate",
        lambda facts: facts.spec.lr_phases.warmup > 0,
        ("optimizer.lr_warmup_init",),
    ),
    Feature("more than one rank", lambda facts: facts.world_size > 1, ("checkpoint.in_memory_interval",)),
    Feature("checkpoint.save", lambda facts: facts.config.checkpoint.save is not None, _in("checkpoint", *SAVING)),
    Feature(
        "logging.wandb_project",
        lambda facts: facts.config.logging.wandb_project is not None,
        ("logging.wandb_name", "logging.wandb_mode"),
    ),
    Feature(
        "logging.noise_scale_interval",
        lambda facts: facts.config.logging.noise_scale_interval is not None,
        ("logging.noise_scale_batch_size",),
    ),
    Feature("logging.profile", lambda facts: facts.config.logging.profile, ("logging.record_memory_history",)),
    Feature(
        "data.reset_attention_mask",
        lambda facts: facts.config.data.reset_attention_mask,
        ("data.mean_document_length",),
    ),
    Feature("data.goldfish_k", lambda facts: facts.config.data.goldfish_k is not None, ("data.goldfish_h",)),
    Feature(f"a path that begins with {HF_PREFIX}", _streams, _in("data", *STREAMING)),
    Feature(
        "model.num_moe_experts",
        lambda facts: facts.config.model.num_moe_experts is not None,
        (
            *_in("model", *(name for name in ModelConfig.model_fields if name.startswith("moe_"))),
            "parallel.expert_load_imbalance",
        ),
    ),
    Feature(
        "parallel.expert_model_parallel_size above 1",
        lambda facts: facts.config.parallel.expert_model_parallel_size > 1,
        ("parallel.moe_token_dispatcher_type",),
    ),
)


def unused(facts: Facts) -> Iterator[str]:
    """Yield the keys of features that are off, and what they need, in one line."""
    off = (feature for feature in FEATURES if not feature.is_on(facts))
    found = {each: [facts.named(key) for key in each.keys if facts.is_set(key)] for each in off}
    parts = [f"{', '.join(keys)} without {feature.needs}" for feature, keys in found.items() if keys]
    if parts:
        yield f"no effect in this run: {'; '.join(parts)}"


def remarks(facts: Facts) -> Iterator[str]:
    """Yield what a user should know of a valid configuration, a line each."""
    yield from unused(facts)
    yield from _beyond_the_end(facts)
    checkpoint = facts.config.checkpoint
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if checkpoint.save and retain and interval and retain % interval:
        yield (
            f"{facts.named('checkpoint.save_retain_interval')}: not a multiple of checkpoint.save_interval={interval}, "
            "so that some checkpoints to retain are never saved; use for example "
            f"{-(-retain // interval) * interval}"
        )


def _beyond_the_end(facts: Facts) -> Iterator[str]:
    """Yield the keys whose iterations, or samples, a short run does not reach."""
    config, logging, spec = facts.config, facts.config.logging, facts.spec
    last, profiled = spec.train_iters, (logging.profile_step_start,) if logging.profile else ()
    by_samples = config.train.train_samples is not None
    length = plain(config, "train.train_samples") if by_samples else f"train.train_iters={last}"
    after = f", iteration {last}" * by_samples
    for key, iterations in (("trace_iterations", logging.trace_iterations), ("profile_step_start", profiled)):
        if late := [iteration for iteration in iterations if iteration > last]:
            yield f"{facts.named(f'logging.{key}')}: the run ends at {length}{after}, before {late[0]}"
    optimizer, phases, unit = config.optimizer, spec.lr_phases, "samples" if by_samples else "iters"
    final, end = config.train.train_samples or last, f"the run ends at {length}"
    if phases.warmup > final:
        reached = f"{optimizer.lr * final / phases.warmup:.3g} of {plain(config, 'optimizer.lr')}"
        key = f"lr_warmup_{unit}" if optimizer.lr_warmup_fraction is None else "lr_warmup_fraction"
        yield f"{facts.named(f'optimizer.{key}')}: {end}, when the learning rate is {reached}"
    elif optimizer.lr_decay_style == "WSD" and getattr(optimizer, f"lr_decay_{unit}") is None:
        key, phase = f"lr_wsd_decay_{unit}", getattr(optimizer, f"lr_wsd_decay_{unit}") or 0
        if phase > final - phases.warmup:
            yield f"{facts.named(f'optimizer.{key}')}: {end}, so that only the last part of this phase is left"
