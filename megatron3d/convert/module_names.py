"""Names of modules in files of Hugging Face, and of our modules whose tensors they hold: one table per model type.

GPT-2's linears are `Conv1D`, y = x W + b, whose W is the transpose of our weight; Llama's weights are like ours.
"""

from __future__ import annotations

from collections.abc import Mapping

# Hugging Face module: our modules whose tensors it concatenates; {n} is the layer.  Marks: * a Conv1D, whose weight is
# transposed; % rows are those of a first head of each part, then of the second heads, ...; = parts are side by side;
# ~ rows of the parts alternate one by one; ! a parameter, not a module.
_GPT2 = {
    "transformer.wte": ("embedding",),
    "transformer.wpe": ("embedding.position",),
    "transformer.h.{n}.ln_1": ("layers.{n}.input_norm",),
    "transformer.h.{n}.attn.c_attn*": ("layers.{n}.attention.q", "layers.{n}.attention.k", "layers.{n}.attention.v"),
    "transformer.h.{n}.attn.c_proj*": ("layers.{n}.attention.proj",),
    "transformer.h.{n}.ln_2": ("layers.{n}.post_attention_norm",),
    "transformer.h.{n}.mlp.c_fc*": ("layers.{n}.mlp.up",),
    "transformer.h.{n}.mlp.c_proj*": ("layers.{n}.mlp.fc2",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("head",),
}
_LLAMA = {
    "model.embed_tokens": ("embedding",),
    "model.layers.{n}.input_layernorm": ("layers.{n}.input_norm",),
    "model.layers.{n}.self_attn.q_proj": ("layers.{n}.attention.q",),
    "model.layers.{n}.self_attn.k_proj": ("layers.{n}.attention.k",),
    "model.layers.{n}.self_attn.v_proj": ("layers.{n}.attention.v",),
    "model.layers.{n}.self_attn.o_proj": ("layers.{n}.attention.proj",),
    "model.layers.{n}.post_attention_layernorm": ("layers.{n}.post_attention_norm",),
    "model.layers.{n}.mlp.gate_proj": ("layers.{n}.mlp.gate",),
    "model.layers.{n}.mlp.up_proj": ("layers.{n}.mlp.up",),
    "model.layers.{n}.mlp.down_proj": ("layers.{n}.mlp.fc2",),
    "model.norm": ("final_norm",),
    "lm_head": ("head",),
}
_NEOX = {
    "gpt_neox.embed_in": ("embedding",),
    "gpt_neox.layers.{n}.input_layernorm": ("layers.{n}.input_norm",),
    "gpt_neox.layers.{n}.attention.query_key_value%": tuple(f"layers.{{n}}.attention.{part}" for part in "qkv"),
    "gpt_neox.layers.{n}.attention.dense": ("layers.{n}.attention.proj",),
    "gpt_neox.layers.{n}.post_attention_layernorm": ("layers.{n}.post_attention_norm",),
    "gpt_neox.layers.{n}.mlp.dense_h_to_4h": ("layers.{n}.mlp.up",),
    "gpt_neox.layers.{n}.mlp.dense_4h_to_h": ("layers.{n}.mlp.fc2",),
    "gpt_neox.final_layer_norm": ("final_norm",),
    "embed_out": ("head",),
}
_HEAD_NORMS = {
    "model.layers.{n}.self_attn.q_norm": ("layers.{n}.attention.q_norm",),
    "model.layers.{n}.self_attn.k_norm": ("layers.{n}.attention.k_norm",),
}
LAYER = "model.layers.{n}."
_NO_NORMS = {f"{LAYER}input_layernorm": None, f"{LAYER}post_attention_layernorm": None}
_OUTPUT_NORMS = {
    f"{LAYER}post_attention_layernorm": ("layers.{n}.attention_output_norm",),
    f"{LAYER}post_feedforward_layernorm": ("layers.{n}.mlp_output_norm",),
}
_INPUT_NORM_OF_MLP = {f"{LAYER}pre_feedforward_layernorm": ("layers.{n}.post_attention_norm",)}
_FUSED_ATTENTION = {f"{LAYER}self_attn.{part}_proj": None for part in "qkv"} | {
    f"{LAYER}self_attn.qkv_proj": tuple(f"layers.{{n}}.attention.{part}" for part in "qkv")
}


def _modules(*changes: Mapping[str, tuple[str, ...] | None]) -> dict[str, tuple[str, ...]]:
    """Return Llama's modules with those that a model type lacks (None), has in addition, or names otherwise."""
    found: dict[str, tuple[str, ...] | None] = dict(_LLAMA)
    for change in changes:
        found |= change
    return {theirs: ours for theirs, ours in found.items() if ours is not None}


_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "fc2"}
_EXPERTS = {
    f"{LAYER}mlp.experts.{{e}}.{theirs}": (f"layers.{{n}}.mlp.experts.{{e}}.{ours}",) for theirs, ours in _PARTS.items()
}
_ROUTER = {f"{LAYER}mlp.gate": ("layers.{n}.mlp.router",)}
_CHOICE_BIAS = {f"{LAYER}mlp.gate.e_score_correction_bias!": ("layers.{n}.mlp.router.expert_bias",)}
_SHARED = {
    f"{LAYER}mlp.shared_experts.{theirs}": (f"layers.{{n}}.mlp.shared_experts.{ours}",)
    for theirs, ours in _PARTS.items()
}
_GATED_SHARED = {
    f"{LAYER}mlp.shared_expert.{theirs}": (f"layers.{{n}}.mlp.shared_experts.{ours}",)
    for theirs, ours in _PARTS.items()
} | {f"{LAYER}mlp.shared_expert_gate": ("layers.{n}.mlp.shared_gate",)}
_MIXTRAL = {
    f"{LAYER}block_sparse_moe.gate": ("layers.{n}.mlp.router",),
    f"{LAYER}block_sparse_moe.experts.{{e}}.w1": ("layers.{n}.mlp.experts.{e}.gate",),
    f"{LAYER}block_sparse_moe.experts.{{e}}.w3": ("layers.{n}.mlp.experts.{e}.up",),
    f"{LAYER}block_sparse_moe.experts.{{e}}.w2": ("layers.{n}.mlp.experts.{e}.fc2",),
}
_GPT_OSS = {
    f"{LAYER}self_attn.sinks!": ("layers.{n}.attention.sinks",),
    f"{LAYER}mlp.router": ("layers.{n}.mlp.router",),
    f"{LAYER}mlp.experts.gate_up_proj*~": tuple(f"layers.{{n}}.mlp.experts.{{e}}.{part}" for part in ("gate", "up")),
    f"{LAYER}mlp.experts.down_proj*": ("layers.{n}.mlp.experts.{e}.fc2",),
}
# Multi-head latent attention, with a latent of queries or without.
_LATENTS = {
    f"{LAYER}self_attn.k_proj": None,
    f"{LAYER}self_attn.v_proj": None,
    f"{LAYER}self_attn.q_a_proj": ("layers.{n}.attention.q_down",),
    f"{LAYER}self_attn.q_a_layernorm": ("layers.{n}.attention.q_norm",),
    f"{LAYER}self_attn.q_b_proj": ("layers.{n}.attention.q_up",),
    f"{LAYER}self_attn.kv_a_proj_with_mqa": ("layers.{n}.attention.kv_down", "layers.{n}.attention.k_pos"),
    f"{LAYER}self_attn.kv_a_layernorm": ("layers.{n}.attention.kv_norm",),
    f"{LAYER}self_attn.kv_b_proj%": ("layers.{n}.attention.k_up", "layers.{n}.attention.v_up"),
}
_NO_GATE: Mapping[str, None] = {f"{LAYER}mlp.gate_proj": None}
# Modules of multi-token prediction, after the last layer: {n} in our names is the module's.
MTP_MODULES: Mapping[str, tuple[str, ...]] = {
    "enorm": ("mtp.{n}.embedding_norm",),
    "hnorm": ("mtp.{n}.hidden_norm",),
    "eh_proj=": ("mtp.{n}.embedding_proj", "mtp.{n}.hidden_proj"),
    "shared_head.norm": ("mtp.{n}.final_norm",),
}
# Copies of the embedding and of the head that files may hold with these modules.
MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# All experts of a layer in one tensor, in place of one tensor for each expert.
STACKED_EXPERTS: Mapping[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*_EXPERTS, *_MIXTRAL)),
    **_ROUTER,
    f"{LAYER}mlp.experts.gate_up_proj": tuple(f"layers.{{n}}.mlp.experts.{{e}}.{part}" for part in ("gate", "up")),
    f"{LAYER}mlp.experts.down_proj": ("layers.{n}.mlp.experts.{e}.fc2",),
}
MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _modules(_HEAD_NORMS),
    "smollm3": _LLAMA,
    "olmo": _modules(_NO_NORMS, {"model.norm": None}),
    "olmo2": _modules(_NO_NORMS, _HEAD_NORMS, _OUTPUT_NORMS),
    "olmo3": _modules(_NO_NORMS, _HEAD_NORMS, _OUTPUT_NORMS),
    "phi3": _modules(
        _FUSED_ATTENTION,
        {
            f"{LAYER}mlp.gate_proj": None,
            f"{LAYER}mlp.up_proj": None,
            f"{LAYER}mlp.gate_up_proj": ("layers.{n}.mlp.gate", "layers.{n}.mlp.up"),
        },
    ),
    "granite": _LLAMA,
    "starcoder2": _modules(
        _NO_GATE,
        {
            f"{LAYER}mlp.up_proj": None,
            f"{LAYER}mlp.down_proj": None,
            f"{LAYER}mlp.c_fc": ("layers.{n}.mlp.up",),
            f"{LAYER}mlp.c_proj": ("layers.{n}.mlp.fc2",),
        },
    ),
    "nemotron": _modules(_NO_GATE),
    "gpt_neox": _NEOX,
    "deepseek_v2": _modules(_LATENTS, _ROUTER, _SHARED, _EXPERTS),
    "deepseek_v3": _modules(_LATENTS, _ROUTER, _CHOICE_BIAS, _SHARED, _EXPERTS),
    "glm4_moe": _modules(_HEAD_NORMS, _ROUTER, _CHOICE_BIAS, _SHARED, _EXPERTS),
    "mixtral": _modules(_MIXTRAL),
    "gpt_oss": _modules(_GPT_OSS),
    "qwen2_moe": _modules(_ROUTER, _GATED_SHARED, _EXPERTS),
    "qwen3_moe": _modules(_HEAD_NORMS, _ROUTER, _EXPERTS),
    "olmoe": _modules(_HEAD_NORMS, _ROUTER, _EXPERTS),
    "gemma": _LLAMA,
    "gemma2": _modules(_OUTPUT_NORMS, _INPUT_NORM_OF_MLP),
    "gemma3_text": _modules(
        _HEAD_NORMS,
        _OUTPUT_NORMS,
        _INPUT_NORM_OF_MLP,
    ),
}
