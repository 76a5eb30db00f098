"""Options of the model, each declared once: type, default, limits, description and names elsewhere.

Here are the keys of the section `model` that `Architecture` has under the same name.  `ModelConfig` inherits and
validates them; `Architecture` inherits them too, with those that are open resolved, and is what all other code reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.config import JsonDict

from megatron3d.runtime.arguments import MAX_NUMBER

MAX_LAYERS = 10_000  # layers, or stages of a pipeline

ActivationName = Literal[
    "gelu", "gelu_tanh", "relu", "squared_relu", "xielu", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"
]
NormName = Literal["LayerNorm", "RMSNorm", "PlainLayerNorm", "BiaslessLayerNorm"]
PositionName = Literal["learned_absolute", "rope", "none"]


def option(
    description: str | None = None,
    *,
    default: Any = ...,
    most: int = MAX_NUMBER,
    choices: Iterable[str] = (),
    also: str = "",
    **limits: Any,
) -> Any:
    """Declare a key of the configuration.

    `most` is its largest number, far above every known model or machine, `choices` the texts that it allows where they
    are the entries of a table, and `limits` are those of pydantic.  `also` are names of the same option in nanoGPT,
    Hugging Face, torchtitan, nanotron, DeepSpeed and Megatron's command line; those with a section are torchtitan's.
    """
    extra: JsonDict = {"most": most, "also": [*also.split()], **({"enum": [*choices]} if choices else {})}
    return Field(default, description=description, json_schema_extra=extra, **limits)


@dataclass(frozen=True, kw_only=True)
class FamilyOption:
    """The first key of the configuration, which chooses defaults of options; the architecture does not keep it."""

    family: Literal["gpt2", "llama"] = "gpt2"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that the configuration and the architecture share; None: derived, or not used."""

    num_layers: Annotated[int, option(ge=1, most=MAX_LAYERS, also="n_layer n_layers num_hidden_layers depth")] = 12
    hidden_size: Annotated[int, option(ge=1, most=10**6, also="n_embd dim d_model embedding_dim")] = 768
    ffn_hidden_size: Annotated[
        int | None,
        option(
            "default: 4 hidden, or 8/3 hidden rounded up to 256 where the activation is gated",
            ge=1,
            most=10**7,
            also="intermediate_size n_inner d_ff",
        ),
    ] = None
    num_attention_heads: Annotated[int, option(ge=1, most=10**5, also="n_head n_heads num_heads")] = 12
    num_query_groups: Annotated[
        int | None,
        option(
            "key/value heads; default: num_attention_heads",
            ge=1,
            most=10**5,
            also="n_kv_heads n_kv_head num_key_value_heads group_query_attention",
        ),
    ] = None
    q_lora_rank: Annotated[
        int | None,
        option("with multi_latent_attention: size of the latent of queries; default: they have none", ge=1, most=10**6),
    ] = None
    kv_lora_rank: Annotated[
        int | None,
        option("with multi_latent_attention: size of the latent of keys and values; default: 512", ge=1, most=10**6),
    ] = None
    qk_head_dim: Annotated[
        int | None,
        option("with multi_latent_attention: a head's query and key without positions; default: 128", ge=1, most=10**5),
    ] = None
    qk_pos_emb_head_dim: Annotated[
        int | None,
        option("with multi_latent_attention: the rotated channels that follow them; default: 64", ge=2, most=10**5),
    ] = None
    v_head_dim: Annotated[
        int | None, option("with multi_latent_attention: a head's value and output; default: 128", ge=1, most=10**5)
    ] = None
    kv_channels: Annotated[
        int | None, option("size of a head; default: hidden / heads", ge=1, most=10**5, also="head_dim")
    ] = None
    seq_length: Annotated[
        int, option(ge=1, most=10**7, also="block_size seq_len sequence_length max_seq_len context_length")
    ] = 1024
    max_position_embeddings: Annotated[
        int | None, option("default: seq_length", ge=1, most=10**7, also="max_context_length n_positions")
    ] = None
    vocab_size: Annotated[
        int | None, option("default: the tokenizer's", ge=1, most=10**8, also="padded_vocab_size")
    ] = None
    position_embedding_type: Annotated[
        PositionName | None,
        option("default: the family's", also="position_embedding pos_emb use_rotary_position_embeddings"),
    ] = None
    rotary_base: Annotated[float, option(gt=0, also="rope_theta rope_base")] = 10000.0
    rope_local_base_freq: Annotated[
        float | None,
        option(
            "base of RoPE in layers with the window, which rotary_scaling then leaves alone; default: rotary_base, "
            "scaled as in all layers",
            gt=0,
            also="local_rope_theta rotary_base_local",
        ),
    ] = None
    rotary_percent: Annotated[
        float,
        option(
            "fraction of each head's channels that RoPE rotates, the first ones",
            gt=0,
            le=1,
            also="partial_rotary_factor rotary_pct",
        ),
    ] = 1.0
    rotary_interleaved: Annotated[
        bool, option("RoPE rotates neighbouring channels, not channels of both halves of a head")
    ] = False
    normalization: Annotated[
        NormName | None,
        option(
            "PlainLayerNorm is LayerNorm without weights and biases, BiaslessLayerNorm without biases; default: the "
            "family's",
            also="norm norm_type elementwise_affine",
        ),
    ] = None
    norm_epsilon: Annotated[float, option(gt=0, also="layernorm_epsilon rms_norm_eps layer_norm_eps norm_eps")] = 1e-5
    activation: Annotated[
        ActivationName | None,
        option("default: the family's", also="hidden_act activation_function swiglu squared_relu openai_gelu"),
    ] = None
    add_bias_linear: Annotated[
        bool | None, option("biases of all linears of a layer; default: the family's", also="bias disable_bias_linear")
    ] = None
    add_qkv_bias: Annotated[
        bool | None,
        option(
            "bias of the query, key and value projections; default: add_bias_linear", also="qkv_bias attention_bias"
        ),
    ] = None
    add_mlp_bias: Annotated[bool | None, option("biases of the MLP; default: add_bias_linear", also="mlp_bias")] = None
    apply_layernorm_1p: Annotated[
        bool, option("norms multiply by 1 + weight, with weights around 0", also="layernorm_zero_centered_gamma")
    ] = False
    norm_placement: Annotated[
        Literal["pre", "post", "sandwich", "shared"],
        option(
            "norms on the inputs of attention and MLP, on their outputs, or on both; shared: with "
            "use_parallel_residual, one on the input of both",
            also="post_norm norm_position apply_residual_connection_post_layernorm",
        ),
    ] = "pre"
    use_parallel_residual: Annotated[
        bool,
        option(
            "attention and MLP of a layer both read its input: x + attention(norm(x)) + MLP(norm(x))",
            also="parallel_attn parallel_residual",
        ),
    ] = False
    attention_output_gate: Annotated[
        bool, option("multiply attention's output by the sigmoid of a projection of its input")
    ] = False
    embedding_scale: Annotated[float, option("factor of the word embeddings", gt=0, also="embedding_multiplier")] = 1.0
    residual_scale: Annotated[
        float,
        option(
            "factor of the outputs of attention and MLP where they are added to their layer's input",
            gt=0,
            also="residual_multiplier",
        ),
    ] = 1.0
    softmax_scale: Annotated[
        float | None,
        option(
            "factor of attention's scores; default: 1 / root of kv_channels",
            gt=0,
            also="attention_multiplier query_pre_attn_scalar",
        ),
    ] = None
    attention_softcap: Annotated[
        float | None,
        option(
            "c: attention's scores become c tanh(score / c); default: unbounded",
            gt=0,
            also="attn_logit_softcapping attn_logit_softcap",
        ),
    ] = None
    clip_qkv: Annotated[
        float | None,
        option(
            "c: queries, keys and values below -c become -c, those above c become c, before norms of heads and RoPE; "
            "default: unbounded",
            gt=0,
        ),
    ] = None
    attention_temperature_beta: Annotated[
        float | None,
        option(
            "queries at position p are multiplied by 1 + beta ln(1 + floor((p + attention_temperature_offset) / "
            "attention_temperature_length)); default: by nothing",
            gt=0,
            also="attn_scale llama_4_scaling_beta attn_temperature_tuning",
        ),
    ] = None
    attention_temperature_length: Annotated[
        int, option("with attention_temperature_beta: positions of a step", ge=1, most=10**7, also="floor_scale")
    ] = 8192
    attention_temperature_offset: Annotated[
        int, option("with attention_temperature_beta: added to positions", ge=0, most=1)
    ] = 0
    attention_temperature_layers: Annotated[
        Literal["all", "no_rope"],
        option("with attention_temperature_beta: layers that have it: all, or those without RoPE"),
    ] = "all"
    softmax_type: Annotated[
        Literal["vanilla", "off-by-one", "learnable"],
        option(
            "attention sinks: off-by-one adds 1 to the denominator of attention's softmax, learnable the exponential "
            "of a parameter of each head",
            also="attention_sinks sinks",
        ),
    ] = "vanilla"
    logit_scale: Annotated[float, option("factor of the logits", gt=0, also="logits_scaling")] = 1.0
    logit_softcap: Annotated[
        float | None,
        option(
            "c: logits become c tanh(logit / c), after logit_scale; default: unbounded",
            gt=0,
            also="final_logit_softcapping",
        ),
    ] = None
    tie_embeddings: Annotated[
        bool | None, option("default: the family's", also="tie_word_embeddings untie_embeddings_and_output_weights")
    ] = None
    qk_layernorm: Annotated[bool, option("normalize queries and keys", also="qk_norm")] = False
    qk_layernorm_scope: Annotated[
        Literal["head", "projection"], option("with qk_layernorm: over each head, or over all heads together")
    ] = "head"
    qk_layernorm_after_rope: Annotated[
        bool, option("with qk_layernorm over each head: queries and keys are normalized behind RoPE, not before it")
    ] = False
    qk_l2_norm: Annotated[
        bool,
        option("divide queries and keys of each head by their root mean square, without weights, in layers with RoPE"),
    ] = False
    hidden_dropout: Annotated[float, option(ge=0, lt=1, also="dropout")] = 0.0
    attention_dropout: Annotated[float, option(ge=0, lt=1)] = 0.0
    init_method_std: Annotated[float, option(gt=0, also="initializer_range init_std")] = 0.02
    mup_base_hidden_size: Annotated[
        int | None,
        option(
            "muP: hidden_size of the model for which lr and init_method_std are chosen, which then fit this one; "
            "default: no muP",
            ge=1,
            most=10**6,
            also="mup_base_width mup_base_d_model mup_base_hidden mup_width_multiplier",
        ),
    ] = None
    mtp_num_layers: Annotated[
        int,
        option("multi-token prediction: modules that each predict one token further ahead; 0: none", ge=0, most=1000),
    ] = 0
    mtp_loss_scaling_factor: Annotated[
        float, option("with mtp_num_layers: factor of the mean of their losses in the total loss", gt=0)
    ] = 0.1
