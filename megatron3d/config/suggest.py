"""Suggestions for unknown keys: similar names, and the names of the same option in other frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from megatron3d.config.schema import Config

SECTIONS: Mapping[str, tuple[str, ...]] = {
    section: tuple(type(getattr(Config(), section)).model_fields) for section in Config.model_fields
}

# Names of the same options in nanoGPT, Hugging Face, torchtitan, nanotron, DeepSpeed and Megatron's command line; those
# of docs/coming_from.md with a section are torchtitan's.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "model.num_layers": ("n_layer", "n_layers", "num_hidden_layers", "depth"),
    "model.hidden_size": ("n_embd", "dim", "d_model", "embedding_dim"),
    "model.ffn_hidden_size": ("intermediate_size", "n_inner", "d_ff"),
    "model.num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "model.num_query_groups": ("n_kv_heads", "n_kv_head", "num_key_value_heads", "group_query_attention"),
    "model.kv_channels": ("head_dim",),
    "model.seq_length": ("block_size", "seq_len", "sequence_length", "max_seq_len", "context_length"),
    "model.max_position_embeddings": ("max_context_length", "n_positions"),
    "model.vocab_size": ("padded_vocab_size",),
    "model.position_embedding_type": ("position_embedding", "pos_emb", "use_rotary_position_embeddings"),
    "model.rotary_base": ("rope_theta", "rope_base"),
    "model.rope_local_base_freq": ("local_rope_theta", "rotary_base_local"),
    "model.add_qkv_bias": ("qkv_bias", "attention_bias"),
    "model.add_mlp_bias": ("mlp_bias",),
    "model.apply_layernorm_1p": ("layernorm_zero_centered_gamma",),
    "model.norm_placement": ("post_norm", "norm_position", "apply_residual_connection_post_layernorm"),
    "model.use_parallel_residual": ("parallel_attn", "parallel_residual"),
    "model.embedding_scale": ("embedding_multiplier",),
    "model.residual_scale": ("residual_multiplier",),
    "model.softmax_scale": ("attention_multiplier", "query_pre_attn_scalar"),
    "model.logit_scale": ("logits_scaling",),
    "model.attention_softcap": ("attn_logit_softcapping", "attn_logit_softcap"),
    "model.softmax_type": ("attention_sinks", "sinks"),
    "model.logit_softcap": ("final_logit_softcapping",),
    "model.rotary_percent": ("partial_rotary_factor", "rotary_pct"),
    "model.num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "model.moe_router_topk": ("num_experts_per_tok", "top_k"),
    "model.moe_ffn_hidden_size": ("moe_intermediate_size",),
    "model.moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "model.moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "model.moe_expert_capacity_factor": ("capacity_factor", "moe_capacity_factor", "expert_capacity"),
    "model.moe_router_num_groups": ("n_group",),
    "model.moe_router_group_topk": ("topk_group",),
    "model.no_rope_freq": ("no_rope_layer_interval", "no_rope_layers"),
    "model.window_size": ("sliding_window", "attention_window"),
    "model.window_attn_skip_freq": ("sliding_window_pattern",),
    "model.rotary_scaling": ("rope_scaling", "use_rope_scaling", "rope_type"),
    "model.rotary_scaling_factor": ("rope_scaling_factor",),
    "model.original_max_position_embeddings": ("original_max_position_embedding", "old_context_len"),
    "model.normalization": ("norm", "norm_type", "elementwise_affine"),
    "model.norm_epsilon": ("layernorm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_eps"),
    "model.activation": ("hidden_act", "activation_function", "swiglu", "squared_relu", "openai_gelu"),
    "model.add_bias_linear": ("bias", "disable_bias_linear"),
    "model.tie_embeddings": ("tie_word_embeddings", "untie_embeddings_and_output_weights"),
    "model.qk_layernorm": ("qk_norm",),
    "model.hidden_dropout": ("dropout",),
    "model.init_method_std": ("initializer_range", "init_std"),
    "parallel.tensor_model_parallel_size": ("tp", "tp_size", "tensor_parallel_size", "tensor_parallel_degree"),
    "parallel.tensor_parallel_mode": ("tp_mode", "tensor_mode"),
    "parallel.tensor_parallel_shape": ("tp_shape", "tensor_shape"),
    "parallel.sequence_parallel": ("sp",),
    "parallel.pipeline_model_parallel_size": ("pp", "pp_size", "pipeline_parallel_size", "pipeline_parallel_degree"),
    "parallel.pipeline_schedule": ("pp_schedule", "pipeline_parallel_schedule"),
    "parallel.virtual_pipeline_model_parallel_size": (
        "vp",
        "vp_size",
        "vpp",
        "num_model_chunks",
        "num_virtual_stages",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ),
    "parallel.pipeline_schedule_file": ("pipeline_parallel_schedule_csv",),
    "train.micro_batch_size": (
        "batch_size",
        "mbs",
        "local_batch_size",
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
    ),
    "train.global_batch_size": ("gbs", "train_batch_size", "total_batch_size", "gradient_accumulation_steps"),
    "train.train_iters": ("max_iters", "steps", "max_steps", "train_steps", "num_steps", "iterations", "train_samples"),
    "train.precision": (
        "dtype",
        "bf16",
        "fp16",
        "params_dtype",
        "mixed_precision",
        "mixed_precision_param",
        "torch_dtype",
    ),
    "optimizer.lr": ("learning_rate",),
    "optimizer.min_lr": ("lr_min", "min_learning_rate"),
    "optimizer.lr_decay_style": ("lr_scheduler_type", "schedule", "lr_schedule", "decay_lr", "decay_type"),
    "optimizer.lr_warmup_iters": ("warmup_iters", "warmup_steps", "lr_warmup_steps", "warmup"),
    "optimizer.lr_decay_iters": ("decay_iters", "lr_decay_steps"),
    "optimizer.adam_beta1": ("beta1",),
    "optimizer.adam_beta2": ("beta2",),
    "optimizer.adam_eps": ("eps", "epsilon", "adam_epsilon"),
    "optimizer.clip_grad": ("grad_clip", "max_norm", "max_grad_norm", "gradient_clipping"),
    "data.data_path": ("dataset", "dataset_path", "train_data_path"),
    "data.tokenizer_model": ("vocab_file", "tokenizer_path"),
    "data.tokenizer_type": ("tokenizer",),
    "checkpoint.save": ("out_dir", "output_dir", "checkpoints_path", "save_dir", "checkpoint.folder"),
    "checkpoint.load": ("resume", "resume_from", "load_dir", "init_from", "resume_from_checkpoint"),
    "checkpoint.save_interval": ("checkpoint_interval", "ckpt_interval", "save_steps", "checkpoint.interval"),
    "parallel.pipeline_model_parallel_layout": (
        "decoder_first_pipeline_num_layers",
        "num_layers_in_first_pipeline_stage",
    ),
    "parallel.zero_stage": (
        "use_distributed_optimizer",
        "data_parallel_sharding_strategy",
        "data_parallel_shard_degree",
        "stage",
        "zero",
        "fsdp",
    ),
    "parallel.num_distributed_optimizer_instances": ("data_parallel_replicate_degree",),
    "train.bucket_mb": ("ddp_bucket_size", "bucket_cap_mb", "reduce_bucket_size"),
    "train.recompute_granularity": ("activation_checkpoint.mode", "gradient_checkpointing", "recompute_activations"),
    "train.compile": ("compile.enable", "torch_compile"),
    "train.eval_interval": ("eval_steps",),
    "logging.log_interval": ("logging_steps", "log_freq"),
    "logging.log_moments_interval": ("log_params_norm", "log_num_zeros_in_grad"),
    "logging.straggler_factor": ("log_straggler",),
    "logging.tensorboard_dir": ("enable_tensorboard",),
    "logging.wandb_project": ("wandb_log",),
    "logging.wandb_name": ("wandb_run_name", "wandb_exp_name", "run_name"),
}
# Values that names of other frameworks stand for.
_VALUES: Mapping[str, str] = {
    "swiglu": "swiglu",
    "openai_gelu": "gelu_tanh",
    "use_rotary_position_embeddings": "rope",
    "bf16": "bf16",
    "fp16": "fp16",
    "disable_bias_linear": "false",
    "untie_embeddings_and_output_weights": "false",
    "use_distributed_optimizer": "1",
    "fsdp": "3",
    "data_parallel_shard_degree": "3",
    "gradient_checkpointing": "full",
    "recompute_activations": "selective",
}
_BY_ALIAS: Mapping[str, str] = {alias: key for key, aliases in _ALIASES.items() for alias in aliases}


# Words that do not tell one key from another, and letters of a name that are compared.
_COMMON_WORDS = frozenset(
    ("num", "size", "type", "name", "model", "init", "max", "min", "use", "of", "in", "to", "per")
)
_LONGEST = 100


def nearest_key(section: str, name: str) -> str | None:
    """Return the `section.key` closest to a misspelt, misplaced or foreign name, or None if no key is similar.

    A similar key has a word in common with the name, up to its spelling.
    """
    name = name.lower().replace("-", "_")
    if found := _BY_ALIAS.get(f"{section}.{name}"):
        return found
    section = section if section in SECTIONS else (nearest(section, SECTIONS) or "")
    places = [section] if section in SECTIONS else []
    places += [other for other in SECTIONS if other != section]
    exact = next((f"{place}.{name}" for place in places if name in SECTIONS[place]), None)
    if found := exact or _BY_ALIAS.get(name):
        return found
    for place, cutoff in zip(places, [0.6] + [0.75] * len(places), strict=False):
        if near := nearest(name, (key for key in SECTIONS[place] if _share_a_word(name, key)), cutoff):
            return f"{place}.{near}"
    return None


def value_of(name: str) -> str | None:
    """Return the value that a name of another framework stands for: `bf16` for train.precision; None for others."""
    return _VALUES.get(name.lower().replace("-", "_"))


def _share_a_word(name: str, key: str) -> bool:
    words = (word for word in name[:_LONGEST].split("_") if word not in _COMMON_WORDS)
    return any(nearest(word, (other for other in key.split("_") if other not in _COMMON_WORDS), 0.7) for word in words)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None."""
    return next(iter(get_close_matches(name[:_LONGEST], list(known), 1, cutoff)), None)


def one_of(values: Iterable[object]) -> str:
    """Join values as `1, 2, 4 or 8`."""
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last
