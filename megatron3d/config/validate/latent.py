"""Rules of the keys of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.model_defaults import LATENT_KEYS
from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_multiples
from megatron3d.model.recompute_spec import CORE_ATTN, MLA_UP_PROJ

# Keys that latent attention replaces or does without, their values, and why.
REPLACED = {
    "num_query_groups": (None, "every head has keys of its own"),
    "kv_channels": (None, "heads have qk_head_dim + qk_pos_emb_head_dim and v_head_dim channels"),
    "qk_layernorm": (False, "the latents are always normalized"),
    "rotary_percent": (1.0, "RoPE rotates the last qk_pos_emb_head_dim channels of a head"),
    "attention_output_gate": (False, "its output has no gate"),
    "attention_softcap": (None, "its scores have no cap"),
    "softmax_type": ("vanilla", "its heads have no sinks"),
}


def latent_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of latent attention that is unused, and per key that it replaces."""
    model, arch = facts.config.model, facts.arch
    yield from _recompute_problems(facts)
    if not model.multi_latent_attention:
        for key in LATENT_KEYS:
            if getattr(model, key) is not None:
                where = facts.named(f"model.{key}")
                yield f"{where}: not used without model.multi_latent_attention=true; set that, or leave it out"
        return
    for key, (value, why) in REPLACED.items():
        if getattr(model, key) != value:
            where = facts.named(f"model.{key}")
            yield f"{where}: not used with model.multi_latent_attention=true, {why}; leave it out"
    if arch.position_embedding_type != "rope":
        where = facts.named("model.position_embedding_type")
        yield f"{where}: multi_latent_attention has a rotary key; use rope"
    if arch.qk_pos_emb_head_dim % 2:
        where, values = facts.named("model.qk_pos_emb_head_dim"), near_multiples(2, arch.qk_pos_emb_head_dim)
        yield f"{where}: RoPE rotates pairs of channels; use {one_of(values)}"


def _recompute_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for up projections of latents that are recomputed without them, or without their attention."""
    modules = facts.config.train.recompute_modules or ()
    if MLA_UP_PROJ not in modules:
        return
    where = facts.named("train.recompute_modules")
    if not facts.config.model.multi_latent_attention:
        rest = ",".join(each for each in modules if each != MLA_UP_PROJ)
        yield f"{where}: {MLA_UP_PROJ} is a part of latent attention only; use {f'[{rest}]' if rest else 'null'}"
    elif CORE_ATTN not in modules:
        use = ",".join((CORE_ATTN, *modules))
        yield f"{where}: {MLA_UP_PROJ} is recomputed together with the attention after it; use [{use}]"
