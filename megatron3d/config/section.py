"""Base of all sections of the configuration, its largest values, and the types that several sections use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron3d.errors.foreign_text import is_one_line
from megatron3d.runtime.limits import MAX_NUMBER, MAX_RANKS, MAX_SEED

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]

# Largest number of a key, far above every known model; MAX_NUMBER for the keys that are not here.
LARGEST: Mapping[str, int] = {
    "num_layers": 10_000,
    "mtp_num_layers": 1000,
    "hidden_size": 10**6,
    "ffn_hidden_size": 10**7,
    "num_moe_experts": 10**5,
    "moe_layer_freq": 10_000,
    "moe_router_topk": 10**5,
    "moe_ffn_hidden_size": 10**7,
    "moe_shared_expert_intermediate_size": 10**7,
    "moe_router_num_groups": 10**5,
    "moe_router_group_topk": 10**5,
    "moe_expert_capacity_factor": 10**5,
    "num_attention_heads": 10**5,
    "num_query_groups": 10**5,
    "kv_channels": 10**5,
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 10**5),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 10**6),
    "seq_length": 10**7,
    "max_position_embeddings": 10**7,
    "vocab_size": 10**8,
    "make_vocab_size_divisible_by": 10**6,
    "micro_batch_size": 10**6,
    "global_batch_size": 10**6,
    "no_rope_freq": 10_000,
    "window_attn_skip_freq": 10_000,
    "window_size": 10**7,
    "tensor_model_parallel_size": MAX_RANKS,
    "tensor_parallel_shape": MAX_RANKS,
    "context_parallel_size": MAX_RANKS,
    "expert_model_parallel_size": MAX_RANKS,
    "expert_tensor_parallel_size": MAX_RANKS,
    "expert_load_imbalance": MAX_RANKS,
    "hierarchical_context_parallel_sizes": MAX_RANKS,
    "pipeline_model_parallel_size": MAX_RANKS,
    "num_distributed_optimizer_instances": MAX_RANKS,
    "profile_ranks": MAX_RANKS,
    "virtual_pipeline_model_parallel_size": 10_000,
    "tp_num_panels": 10_000,
    "seed": MAX_SEED,
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale"), 2**64),
    "distributed_timeout_minutes": 10**6,
    "bucket_mb": 10**6,
    "eval_iters": 10**6,
    "rollback_window": 10**6,
    "straggler_steps": 10**6,
    "mean_document_length": 10**9,
    "stream_lanes": 10_000,
    "stream_shuffle_rows": 10**9,
    "goldfish_h": 10_000,
}
# Characters of a text, more than a path may have.
MAX_TEXT = 4096


class Refused(ValueError):
    """A value that the rule of its key refuses; the message is the reason and a change that works."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, types are not converted, and values cannot be changed.

    Text has at least one character and none that would harm a terminal, a log or a job script.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1)

    @field_validator("*")
    @classmethod
    def _within_limits(cls, value: object, info: ValidationInfo) -> object:
        """Return the value; raises ValueError for text that is not printable or too long, and for too large numbers."""
        most = LARGEST.get(str(info.field_name), MAX_NUMBER)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and not is_one_line(item):
                raise ValueError("control characters")
            if isinstance(item, str) and len(item) > MAX_TEXT:
                raise Refused(f"{len(item)} characters; use at most {MAX_TEXT}")
            if isinstance(item, int | float) and abs(item) > most:
                raise Refused(f"more than {most}, the largest that is allowed; use {most} or less")
        return value
