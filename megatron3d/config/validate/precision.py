"""Rules of precision: loss scaling is for fp16 only, and apex's kernels support some dtypes only."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.schema import TrainConfig
from megatron3d.config.validate.facts import Facts, plain

DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def precision_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of loss scale, gradient dtype and apex kernels under `train.precision`."""
    yield from _loss_scale_problems(facts)
    yield from _apex_problems(facts)
    yield from _process_problems(facts)
    if facts.config.train.grad_reduce_in_bf16 and facts.config.train.precision == "fp64":
        where = facts.named("train.grad_reduce_in_bf16")
        yield f"{where}: would undo {plain(facts.config, 'train.precision')}, which is for verification; use false"
    if facts.config.train.tp_grad_reduce_in_bf16 and facts.config.train.precision != "bf16":
        where, precision = facts.named("train.tp_grad_reduce_in_bf16"), plain(facts.config, "train.precision")
        yield f"{where}: gradients of {precision} are not in bf16; use false, or train.precision bf16"


def _loss_scale_problems(facts: Facts) -> Iterator[str]:
    config, train = facts.config, facts.config.train
    given = [key for key in ("loss_scale", *DYNAMIC) if getattr(train, key) != TrainConfig.model_fields[key].default]
    if train.precision != "fp16":
        for key in given:
            where, precision = facts.named(f"train.{key}"), plain(config, "train.precision")
            yield f"{where}: not used with {precision}, whose loss is not scaled; use fp16, or leave {key} out"
    elif train.loss_scale is not None:
        for key in given[1:]:
            where, fixed = facts.named(f"train.{key}"), plain(config, "train.loss_scale")
            yield f"{where}: not used with {fixed}, which is fixed; leave one of the two out"
    elif train.min_loss_scale > train.initial_loss_scale:
        initial = plain(config, "train.initial_loss_scale")
        yield f"{facts.named('train.min_loss_scale')}: more than {initial}; use that or less"


def _apex_problems(facts: Facts) -> Iterator[str]:
    config, optimizer = facts.config, facts.config.optimizer
    if config.train.norm_implementation == "apex" and config.train.precision == "fp64":
        where, precision = facts.named("train.norm_implementation"), plain(config, "train.precision")
        yield f"{where}: its kernels compute statistics in fp32, less precise than {precision}; use torch"
    if optimizer.adam_implementation != "apex":
        return
    where = facts.named("optimizer.adam_implementation")
    if config.train.precision == "fp64":
        yield f"{where}: its kernel computes in fp32, less precise than {plain(config, 'train.precision')}; use torch"
    for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(optimizer, key) not in (None, "fp32"):
            yield (
                f"{where}: its kernel does not support {plain(config, f'optimizer.{key}')}; "
                f"use torch, or leave {key} out"
            )


def _process_problems(facts: Facts) -> Iterator[str]:
    """Yield problems of deterministic kernels and of manual garbage collection."""
    train, optimizer = facts.config.train, facts.config.optimizer
    chosen = {"train.norm_implementation": train.norm_implementation}
    chosen["optimizer.adam_implementation"] = optimizer.adam_implementation
    for key in (key for key, value in chosen.items() if train.deterministic_mode and value == "apex"):
        yield (
            f"{facts.named(key)}: torch cannot tell whether apex's kernels are deterministic, as "
            "train.deterministic_mode=true asks; use torch"
        )
    if train.manual_gc_interval and not train.manual_gc:
        where = facts.named("train.manual_gc_interval")
        yield f"{where}: without train.manual_gc Python collects on its own; set that to true, or use 0"
