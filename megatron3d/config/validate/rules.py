"""All rules that a configuration must meet, with one message per broken rule; `files.py` checks files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron3d.config.read import one_of
from megatron3d.config.schema import Config
from megatron3d.config.validate import files, fp8, layout
from megatron3d.config.validate import model as network
from megatron3d.config.validate.facts import Facts, describe_tensor, near_divisors, near_multiples, plain
from megatron3d.config.validate.remarks import DYNAMIC, RECOMPUTE_KEYS
from megatron3d.data.corpus.plan import vocabulary_problem
from megatron3d.model.linear_spec import num_parameters
from megatron3d.model.spec import SHARED_NORM
from megatron3d.pipeline.schedules import size_problems as pipeline_sizes


def precision_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of loss scale, gradient dtype and apex kernels under `train.precision`."""
    yield from _loss_scale_problems(facts)
    yield from _apex_problems(facts)
    yield from _process_problems(facts)
    if facts.config.train.grad_reduce_in_bf16 and facts.config.train.precision == "fp64":
        where = facts.named("train.grad_reduce_in_bf16")
        yield f"{where}: would undo {plain(facts.config, 'train.precision')}, which is for verification; use false"
    is_narrow = facts.config.train.tp_grad_reduce_in_bf16 and facts.spec.tensor_size > 1
    if is_narrow and facts.config.train.precision != "bf16":
        where, precision = facts.named("train.tp_grad_reduce_in_bf16"), plain(facts.config, "train.precision")
        yield f"{where}: gradients of {precision} are not in bf16; use false, or train.precision bf16"


def _loss_scale_problems(facts: Facts) -> Iterator[str]:
    config, train = facts.config, facts.config.train
    if train.precision != "fp16":
        return
    if train.loss_scale is not None:
        for key in (key for key in DYNAMIC if facts.is_set(f"train.{key}")):
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
            use = f"torch, or leave {key} out"
            yield f"{where}: its kernel does not support {plain(config, f'optimizer.{key}')}; use {use}"


def _process_problems(facts: Facts) -> Iterator[str]:
    train, optimizer = facts.config.train, facts.config.optimizer
    chosen = {"train.norm_implementation": train.norm_implementation}
    chosen["optimizer.adam_implementation"] = optimizer.adam_implementation
    for key in (key for key, value in chosen.items() if train.deterministic_mode and value == "apex"):
        yield (
            f"{facts.named(key)}: torch cannot tell whether apex's kernels are deterministic, as "
            "train.deterministic_mode=true asks; use torch"
        )


MAX_PARAMETERS, MAX_TOKENS, MAX_SCORES = 10**15, 10**9, 10**17


def check(
    config: Config, world_size: int, vocab_size: int | None = None, origins: Mapping[str, str] | None = None
) -> list[str]:
    """Return the problems on `world_size` ranks with a tokenizer of `vocab_size` tokens (None: not known yet)."""
    facts = Facts(config, world_size, vocab_size, origins or {})
    return [problem for rule in (value_problems, layout_problems) for problem in rule(facts)]


def value_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems that do not depend on the arrangement of ranks."""
    model = (model_problems, network.expert_problems, network.latent_problems, network.rotary_problems)
    lengths = (network.qk_clip_problems, network.window_problems, network.mtp_problems, size_problems)
    run = (
        schedule_problems,
        layout.ramp_problems,
        files.data_problems,
        precision_problems,
        unused_problems,
        _straggler_problems,
    )
    for rule in (*model, *lengths, *run, files.logging_problems):
        yield from rule(facts)


def layout_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of pipeline, tensor-parallel layout and batch arithmetic."""
    yield from layout.pipeline_problems(facts)
    forms = [*layout.form_problems(facts), *layout.hierarchy_problems(facts)]
    if forms:
        yield from forms
        return
    mode = facts.spec.mode
    if not _heads_unknown(facts.config):
        yield from layout.feature_problems(facts, mode)
        yield from network.mtp_layout_problems(facts, mode)
        yield from layout.exchange_problems(facts)
        yield from layout.group_problems(facts, mode)
        yield from fp8.fp8_problems(facts)
        yield from fp8.block_problems(facts, mode)
    yield from layout.context_problems(facts)
    yield from network.expert_rank_problems(facts)
    if layout.has_chunks(facts):  # else that says which length is right
        yield from layout.token_problems(facts, mode)
    yield from layout.execution_problems(facts, mode)
    yield from batch_problems(facts)


def _heads_unknown(config: Config) -> bool:
    is_given = config.model.kv_channels is not None or config.model.multi_latent_attention
    return not is_given and config.model.hidden_size % config.model.num_attention_heads > 0


def model_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the model section."""
    model, arch = facts.config.model, facts.arch
    heads = model.num_attention_heads
    if _heads_unknown(facts.config):
        where = facts.named("model.num_attention_heads")
        use = f"{one_of(near_divisors(model.hidden_size, heads))}, or set model.kv_channels"
        yield f"{where}: {heads} does not divide model.hidden_size={model.hidden_size}; use {use}"
    elif arch.position_embedding_type == "rope" and arch.kv_channels % 2 and not arch.is_latent:
        key = "model.num_attention_heads" if model.kv_channels is None else "model.kv_channels"
        use = f"model.kv_channels {one_of(near_multiples(2, arch.kv_channels))}"
        yield f"{facts.named(key)}: RoPE rotates pairs of channels, but a head has {arch.kv_channels}; use {use}"
    if heads % arch.num_query_groups:
        where, use = facts.named("model.num_query_groups"), one_of(near_divisors(heads, arch.num_query_groups))
        yield f"{where}: {arch.num_query_groups} does not divide model.num_attention_heads={heads}; use {use}"
    if model.qk_layernorm_scope != "head" and not model.qk_layernorm:
        yield f"{facts.named('model.qk_layernorm_scope')}: not used without model.qk_layernorm=true; leave it out"
    if arch.norm_placement == SHARED_NORM and not model.use_parallel_residual:
        where, key = facts.named("model.norm_placement"), "model.use_parallel_residual"
        yield f"{where}: attention and MLP read the same input with {key}=true only; set that, or use pre"
    yield from _mup_problems(facts)
    if model.apply_layernorm_1p and not arch.num_norm_tensors:
        yield (
            f"{facts.named('model.apply_layernorm_1p')}: norms of normalization={arch.normalization} have no weight; "
            "leave it out, or use LayerNorm"
        )
    if arch.max_position_embeddings < model.seq_length:
        where, use = facts.named("model.max_position_embeddings"), f"{model.seq_length} or more, or leave it out"
        yield f"{where}: less than model.seq_length={model.seq_length}; use {use}"
    if facts.vocab_size and model.vocab_size:
        problem = vocabulary_problem(facts.named("model.vocab_size"), model.vocab_size, facts.vocab_size)
        yield from [problem] if problem else []


def _mup_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key that muP does not scale."""
    config, where = facts.config, facts.named("model.mup_base_hidden_size")
    if config.model.mup_base_hidden_size is None:
        return
    if config.optimizer.optimizer == "muon":
        yield f"{where}: its learning rates are those of Adam, not of optimizer.optimizer=muon; use adam, or lion"
    unknown = {"model.num_moe_experts": config.model.num_moe_experts is not None}
    unknown["model.multi_latent_attention"] = config.model.multi_latent_attention
    unknown["model.mtp_num_layers"] = config.model.mtp_num_layers > 0
    for key in (key for key, is_on in unknown.items() if is_on):
        yield f"{where}: not with {plain(config, key)}, whose matrices have no rule of muP; leave one of the two out"


def _straggler_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key without which no run goes on without its slow ranks."""
    train, logging = facts.config.train, facts.config.logging
    needed = {
        "train.elastic=true": train.elastic,
        "logging.straggler_factor": logging.straggler_factor is not None,
        "logging.timing_log_level=1": logging.timing_log_level > 0,
    }
    for key in (key for key, is_on in needed.items() if train.on_straggler == "replan" and not is_on):
        yield f"{facts.named('train.on_straggler')}: not without {key}; set that, or use report"


def schedule_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the run's length and learning-rate schedule; a run shorter than its phases is a remark."""
    if units := list(_unit_problems(facts)):
        yield from units
        return
    config, optimizer, phases = facts.config, facts.config.optimizer, facts.spec.lr_phases
    unit, units_name = ("samples", "samples") if phases.counts_samples else ("iters", "iterations")
    decay, phase = getattr(optimizer, f"lr_decay_{unit}"), getattr(optimizer, f"lr_wsd_decay_{unit}") or 0
    warmup = optimizer.lr_warmup_samples if phases.counts_samples else optimizer.lr_warmup_iters
    if decay is not None and warmup > decay:
        where = facts.named(f"optimizer.lr_warmup_{unit}")
        yield f"{where}: more than optimizer.lr_decay_{unit}={decay}; use 0 to {decay}"
    elif decay is not None and optimizer.lr_decay_style == "WSD" and phase > (rest := int(decay - phases.warmup)):
        yield (
            f"{facts.named(f'optimizer.lr_wsd_decay_{unit}')}: more than the {rest} {units_name} that "
            f"optimizer.lr_decay_{unit}={decay} leaves after lr_warmup_{unit} {phases.warmup:g}; "
            f"use {one_of(sorted({min(rest, 1), rest}))}"
        )
    yield from _decay_problems(facts)
    if optimizer.lr_warmup_init > optimizer.lr:
        where, use = facts.named("optimizer.lr_warmup_init"), f"0 to {optimizer.lr:g}"
        yield f"{where}: more than {plain(config, 'optimizer.lr')}, at which the warm-up ends; use {use}"
    if optimizer.min_lr > optimizer.lr:
        yield f"{facts.named('optimizer.min_lr')}: more than {plain(config, 'optimizer.lr')}; use 0 to {optimizer.lr:g}"


def _decay_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of the weight decay that contradicts its growth."""
    optimizer = facts.config.optimizer
    style, ends = plain(facts.config, "optimizer.weight_decay_incr_style"), ("start_weight_decay", "end_weight_decay")
    if optimizer.weight_decay_incr_style == "constant":
        for name in (name for name in ends if getattr(optimizer, name) is not None):
            yield f"{facts.named(f'optimizer.{name}')}: not used with {style}; use optimizer.weight_decay, or linear"
        return
    missing = [name for name in ends if getattr(optimizer, name) is None]
    if missing:
        named = " and ".join(f"optimizer.{name}" for name in missing)
        yield f"{facts.named('optimizer.weight_decay_incr_style')}: needs {named}; set that, or use constant"
    if facts.is_set("optimizer.weight_decay"):
        where = facts.named("optimizer.weight_decay")
        yield f"{where}: not used with {style}, where start_weight_decay and end_weight_decay say it; leave it out"


# Keys of the schedule in iterations, by that in samples.
LR_KEYS = {f"lr_{phase}_samples": f"lr_{phase}_iters" for phase in ("warmup", "decay", "wsd_decay")}


def _unit_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key that contradicts the unit, iterations or samples, in which the run is counted."""
    train, optimizer = facts.config.train, facts.config.optimizer
    by_samples, batch = train.train_samples is not None, train.global_batch_size
    if by_samples and train.train_iters is not None:
        where, other = facts.named("train.train_samples"), facts.named("train.train_iters")
        yield f"{where}: not used with {other}, since a run has one length; use null for one of the two"
        return
    has_wsd = optimizer.lr_decay_style == "WSD"  # else a remark says that its keys have no effect
    for samples, iters in LR_KEYS.items():
        wrong, right = (iters, samples) if by_samples else (samples, iters)
        if facts.is_set(f"optimizer.{wrong}") and (has_wsd or "wsd" not in wrong):
            value = getattr(optimizer, wrong)
            use = value * batch if by_samples else -(-value // batch)
            if by_samples:
                why = f"the schedule counts samples, as {plain(facts.config, 'train.train_samples')} does"
            else:
                why = "the schedule counts iterations, since the run has no train.train_samples"
            yield f"{facts.named(f'optimizer.{wrong}')}: {why}; use optimizer.{right}={use}"
    warmup = "lr_warmup_samples" if by_samples else "lr_warmup_iters"
    if optimizer.lr_warmup_fraction is not None and facts.is_set(f"optimizer.{warmup}"):
        where, other = facts.named("optimizer.lr_warmup_fraction"), plain(facts.config, f"optimizer.{warmup}")
        yield f"{where}: not used with {other}, since the warm-up has one length; leave one of the two out"
    first = facts.spec.batches.at(0).num_samples
    if train.train_samples is not None and train.train_samples < first:
        yield f"{facts.named('train.train_samples')}: fewer than the {first} of one batch; use {first} or more"


def unused_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per value that contradicts another one, which makes it useless."""
    config = facts.config
    if config.data.tokenizer_model and config.data.tokenizer_type == "ByteTokenizer":
        yield f"{facts.named('data.tokenizer_model')}: ByteTokenizer has no model file; leave it out"
    if None not in (config.train.loss_chunk_tokens, config.train.loss_chunk_mb):
        where, tokens = facts.named("train.loss_chunk_mb"), plain(config, "train.loss_chunk_tokens")
        yield f"{where}: not used with {tokens}, which limits a chunk as well; leave one of the two out"
    yield from files.checkpoint_problems(facts)
    for key, wanted in RECOMPUTE_KEYS.items():
        if getattr(config.train, key) is not None and config.train.recompute_granularity not in (None, wanted):
            where, granularity = facts.named(f"train.{key}"), plain(config, "train.recompute_granularity")
            yield f"{where}: not used with {granularity}; use {wanted}, or leave {key} out"


def size_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per product of sizes that no machine holds, and for which 64-bit arithmetic would not hold."""
    model, arch, rows = facts.config.model, facts.arch, facts.config.train.micro_batch_size
    tokens = rows * model.seq_length
    if (parameters := num_parameters(arch)) > MAX_PARAMETERS:
        yield (
            f"{facts.named('model.hidden_size')}: the model has {parameters:.3g} parameters, more than "
            f"{MAX_PARAMETERS:.0e}; use a smaller model"
        )
    scores = tokens * model.seq_length * model.num_attention_heads
    if tokens > MAX_TOKENS or scores > MAX_SCORES:
        yield (
            f"{facts.named('train.micro_batch_size')}: a microbatch of {tokens} tokens with {scores:.3g} attention "
            f"scores in a layer, more than {MAX_TOKENS} or {MAX_SCORES:.0e}; use 1, or a smaller model.seq_length"
        )


def batch_problems(facts: Facts) -> Iterator[str]:
    """Check world_size = TP x CP x PP x DP and global_batch_size = micro_batch_size x DP x microbatches."""
    config, sizes = facts.config, facts.spec.sizes
    if sizes.mismatch:
        made = f"{describe_tensor(facts.spec)} x {sizes.factors} = {sizes.model}"
        size = one_of(near_multiples(sizes.model, sizes.world_size))
        factors = {
            facts.shape_key: sizes.tensor,
            "parallel.context_parallel_size": sizes.context,
            "parallel.pipeline_model_parallel_size": sizes.pipeline,
        }
        other = one_of(key for key, factor in factors.items() if factor > 1)
        use = f"{size} processes ({facts.counted_by}), or another {other}"
        yield f"world_size {sizes.world_size}: {sizes.mismatch} {made}; use {use}"
        return
    data, instances = sizes.data, sizes.replicas
    if data % instances:
        where, use = facts.named("parallel.num_distributed_optimizer_instances"), one_of(near_divisors(data, instances))
        yield f"{where}: {instances} does not divide the data parallel size {data}; use {use}"
    step, batch = config.train.micro_batch_size * data, config.train.global_batch_size
    if config.train.pad_global_batch:
        yield from _padding_problems(facts, data)
    if batch % step and not config.train.pad_global_batch:
        fits = batch >= step and batch % config.train.micro_batch_size == 0
        padded = ", or train.pad_global_batch=true" if fits else ""
        yield (
            f"{facts.named('train.global_batch_size')}: not micro_batch_size {config.train.micro_batch_size} x data "
            f"parallel {data} x a whole number of microbatches ({batch} / {step} = {batch / step:.4g}); "
            f"use {one_of(near_multiples(step, batch))}{padded}"
        )
    elif not facts.spec.has_schedule_file:
        sizes_of_schedule = (sizes.pipeline, -(-batch // step), facts.spec.num_virtual_stages)
        for problem in pipeline_sizes(config.parallel.pipeline_schedule, *sizes_of_schedule):
            yield f"{facts.named('train.global_batch_size')}: {problem}"
    if batch % step == 0:
        yield from _noise_scale_problems(facts, step, batch)
    yield from layout.ramp_batch_problems(facts, step)


def _padding_problems(facts: Facts, data: int) -> Iterator[str]:
    """Yield a message per key that reads what empty microbatches would add to."""
    config, where = facts.config, facts.named("train.pad_global_batch")
    size, batch = config.train.micro_batch_size, config.train.global_batch_size
    if batch % size or batch < size * data:
        yield (
            f"{facts.named('train.global_batch_size')}: not micro_batch_size {size} x a whole number of microbatches, "
            f"at least one for each of {data} data-parallel ranks; use {one_of(near_multiples(size * data, batch))}"
        )
    counting = {
        "model.num_moe_experts": config.model.num_moe_experts is not None,
        "optimizer.qk_clip": config.optimizer.qk_clip,
        "logging.noise_scale_interval": config.logging.noise_scale_interval is not None,
        "logging.fp8_stats_interval": config.train.fp8 is not None and config.logging.fp8_stats_interval is not None,
        "train.rampup_batch_size": config.train.rampup_batch_size is not None,
    }
    for key in (key for key, is_on in counting.items() if is_on):
        yield f"{where}: empty microbatches would count in {plain(config, key)}; leave one of the two out"


def _noise_scale_problems(facts: Facts, step: int, batch: int) -> Iterator[str]:
    """Yield a message where a global batch is not a few smaller ones of microbatches of `step` samples on all ranks."""
    logging = facts.config.logging
    size = logging.noise_scale_batch_size
    if logging.noise_scale_interval is None:
        return
    fitting = [each for each in range(step, batch, step) if batch % each == 0]
    rule = f"the batch of {batch} samples is computed in microbatches of {step} on all data-parallel ranks"
    if not fitting:
        yield (
            f"{facts.named('logging.noise_scale_interval')}: {rule}, so that there is no smaller batch to compare "
            "with; use a smaller train.micro_batch_size, a larger train.global_batch_size, or null"
        )
    elif size not in fitting:
        use = one_of([each for each in fitting if size is None or each >= size][:2] or fitting[-1:])
        given = "without noise_scale_batch_size" if size is None else "does not divide it into these"
        where = "logging.noise_scale_interval" if size is None else "logging.noise_scale_batch_size"
        yield f"{facts.named(where)}: {given}; {rule}; use logging.noise_scale_batch_size {use}"
