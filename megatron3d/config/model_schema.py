"""The model section of the configuration; None means: derived by `model_defaults`, often from the model family."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron3d.config.section import Count, Positive, Refused, Section

ActivationName = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]
Window = Annotated[tuple[Count, Count], Field(strict=False, examples=["[127,0]"])]
LayerPattern = Annotated[tuple[Literal[0, 1], ...], Field(strict=False, min_length=1)]


class ModelConfig(Section):
    """The network."""

    family: Literal["gpt2", "llama"] = "gpt2"
    num_layers: int = Field(12, ge=1)
    hidden_size: int = Field(768, ge=1)
    ffn_hidden_size: int | None = Field(
        None, ge=1, description="default: 4 hidden, or 8/3 hidden rounded up to 256 where the activation is gated"
    )
    num_attention_heads: int = Field(12, ge=1)
    num_query_groups: int | None = Field(None, ge=1, description="key/value heads; default: num_attention_heads")
    multi_latent_attention: bool = Field(
        False, description="keys and values of all heads come from one latent of each token, which generation caches"
    )
    q_lora_rank: int | None = Field(
        None, ge=1, description="with multi_latent_attention: size of the latent of queries; default: they have none"
    )
    kv_lora_rank: int | None = Field(
        None, ge=1, description="with multi_latent_attention: size of the latent of keys and values; default: 512"
    )
    qk_head_dim: int | None = Field(
        None, ge=1, description="with multi_latent_attention: a head's query and key without positions; default: 128"
    )
    qk_pos_emb_head_dim: int | None = Field(
        None, ge=2, description="with multi_latent_attention: the rotated channels that follow them; default: 64"
    )
    v_head_dim: int | None = Field(
        None, ge=1, description="with multi_latent_attention: a head's value and output; default: 128"
    )
    kv_channels: int | None = Field(None, ge=1, description="size of a head; default: hidden / heads")
    seq_length: int = Field(1024, ge=1)
    max_position_embeddings: int | None = Field(None, ge=1, description="default: seq_length")
    vocab_size: int | None = Field(None, ge=1, description="default: the tokenizer's")
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = Field(
        None, description="default: the family's"
    )
    rotary_base: float = Field(10000.0, gt=0)
    rope_local_base_freq: float | None = Field(
        None,
        gt=0,
        description="base of RoPE in layers with the window, which rotary_scaling then leaves alone; "
        "default: rotary_base, scaled as in all layers",
    )
    rotary_percent: float = Field(
        1.0, gt=0, le=1, description="fraction of each head's channels that RoPE rotates, the first ones"
    )
    rotary_interleaved: bool = Field(
        False, description="RoPE rotates neighbouring channels, not channels of both halves of a head"
    )
    no_rope_freq: Positive | LayerPattern | None = Field(
        None, description="layers without RoPE: every n-th, or those with a 1 in a list that repeats over depth"
    )
    rotary_scaling: Literal["linear", "llama3", "yarn"] | None = Field(
        None, description="scaling of RoPE for sequences longer than those of earlier training; default: none"
    )
    rotary_scaling_factor: float | None = Field(
        None, ge=1, description="with rotary_scaling: the longest rotations become this much slower"
    )
    original_max_position_embeddings: int | None = Field(
        None, ge=1, description="with llama3 and yarn: sequence length of earlier training"
    )
    rotary_low_freq_factor: float | None = Field(
        None, gt=0, description="with llama3: fewer rotations within the original length are scaled fully; default: 1"
    )
    rotary_high_freq_factor: float | None = Field(
        None, gt=0, description="with llama3: more rotations within the original length are not scaled; default: 4"
    )
    rotary_beta_slow: float | None = Field(
        None, gt=0, description="with yarn: fewer rotations within the original length are scaled fully; default: 1"
    )
    rotary_beta_fast: float | None = Field(
        None, gt=0, description="with yarn: more rotations within the original length are not scaled; default: 32"
    )
    rotary_attention_factor: float | None = Field(
        None, gt=0, description="with yarn: factor of queries and of keys; default: 0.1 ln(rotary_scaling_factor) + 1"
    )
    rotary_truncate: bool | None = Field(
        None, description="with yarn: round the range of interpolated channels to whole channels; default: true"
    )
    window_size: Window | None = Field(
        None,
        description="sliding window: keys that a query sees before itself, and after itself, which is 0; "
        "[127, 0] is Hugging Face's sliding_window=128; default: all keys before it",
    )
    window_attn_skip_freq: Positive | LayerPattern | None = Field(
        None, description="layers without the window: every n-th, or those with a 0 in a list that repeats over depth"
    )
    normalization: Literal["LayerNorm", "RMSNorm", "PlainLayerNorm"] | None = Field(
        None, description="PlainLayerNorm is LayerNorm without weights and biases; default: the family's"
    )
    norm_epsilon: float = Field(1e-5, gt=0)
    activation: ActivationName | None = Field(None, description="default: the family's")
    add_bias_linear: bool | None = Field(None, description="biases of all linears of a layer; default: the family's")
    add_qkv_bias: bool | None = Field(
        None, description="bias of the query, key and value projections; default: add_bias_linear"
    )
    add_mlp_bias: bool | None = Field(None, description="biases of the MLP; default: add_bias_linear")
    apply_layernorm_1p: bool = Field(False, description="norms multiply by 1 + weight, with weights around 0")
    norm_placement: Literal["pre", "post", "sandwich"] = Field(
        "pre", description="norms on the inputs of attention and MLP, on their outputs, or on both"
    )
    use_parallel_residual: bool = Field(
        False, description="attention and MLP of a layer both read its input: x + attention(norm(x)) + MLP(norm(x))"
    )
    attention_output_gate: bool = Field(
        False, description="multiply attention's output by the sigmoid of a projection of its input"
    )
    embedding_scale: float = Field(1.0, gt=0, description="factor of the word embeddings")
    residual_scale: float = Field(
        1.0, gt=0, description="factor of the outputs of attention and MLP where they are added to their layer's input"
    )
    softmax_scale: float | None = Field(
        None, gt=0, description="factor of attention's scores; default: 1 / root of kv_channels"
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="c: attention's scores become c tanh(score / c); default: unbounded"
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = Field(
        "vanilla",
        description="attention sinks: off-by-one adds 1 to the denominator of attention's softmax, learnable the "
        "exponential of a parameter of each head",
    )
    logit_scale: float = Field(1.0, gt=0, description="factor of the logits")
    logit_softcap: float | None = Field(
        None, gt=0, description="c: logits become c tanh(logit / c), after logit_scale; default: unbounded"
    )
    tie_embeddings: bool | None = Field(None, description="default: the family's")
    qk_layernorm: bool = Field(False, description="normalize queries and keys")
    qk_layernorm_scope: Literal["head", "projection"] = Field(
        "head", description="with qk_layernorm: over each head, or over all heads together"
    )
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    init_method_std: float = Field(0.02, gt=0)
    num_moe_experts: int | None = Field(None, ge=1, description="experts of a layer; default: an MLP in every layer")
    moe_layer_freq: Positive | LayerPattern | None = Field(
        None,
        description="layers with experts: each n-th from the first, or those with a 1 in a list that repeats over "
        "depth; default: all",
    )
    moe_router_topk: int | None = Field(None, ge=1, description="experts that each token is sent to; default: 2")
    moe_ffn_hidden_size: int | None = Field(
        None, ge=1, description="inner features of an expert; default: ffn_hidden_size"
    )
    moe_shared_expert_intermediate_size: int | None = Field(
        None, ge=1, description="inner features of all shared experts together, which every token is sent to"
    )
    moe_shared_expert_gate: bool = Field(
        False, description="multiply the shared experts' output by the sigmoid of a projection of their input"
    )
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        "softmax",
        description="scores of experts; the chosen ones are normalized, but see moe_router_pre_softmax",
    )
    moe_router_bias: bool = Field(False, description="the router's logits have a bias, a parameter of the model")
    moe_router_pre_softmax: bool = Field(
        False, description="softmax over all experts before the choice, and no normalization over the chosen ones"
    )
    moe_router_num_groups: int | None = Field(
        None, ge=1, description="groups of experts, of which each token chooses from the best moe_router_group_topk"
    )
    moe_router_group_topk: int | None = Field(None, ge=1, description="with moe_router_num_groups: groups of a token")
    moe_router_topk_scaling_factor: float | None = Field(
        None, gt=0, description="factor of the chosen experts' weights; default: 1"
    )
    moe_router_load_balancing_type: Literal["none", "seq_aux_loss", "global_aux_loss"] = Field(
        "none",
        description="loss that balances the experts' load: of each sequence, or of the global batch with the load of "
        "the step before; losses of a microbatch would depend on the layout",
    )
    moe_router_enable_expert_bias: bool = Field(
        False,
        description="balance without a loss: a bias of each expert, in the choice alone, moves towards an even load at "
        "each step",
    )
    moe_router_bias_update_rate: float | None = Field(
        None, ge=0, description="with moe_router_enable_expert_bias: how far it moves; default: 0.001"
    )
    moe_expert_capacity_factor: float | None = Field(
        None,
        ge=1,
        description="in training, the most tokens of a sequence that an expert takes, in multiples of an even load; "
        "others of its tokens are dropped by it; default: none are",
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="factor of the loss of moe_router_load_balancing_type")
    moe_z_loss_coeff: float = Field(0.0, ge=0, description="factor of the router's z-loss; 0: none")
    mtp_num_layers: int = Field(
        0, ge=0, description="multi-token prediction: modules that each predict one token further ahead; 0: none"
    )
    mtp_loss_scaling_factor: float = Field(
        0.1, gt=0, description="with mtp_num_layers: factor of the mean of their losses in the total loss"
    )

    @field_validator("moe_router_load_balancing_type", mode="before")
    @classmethod
    def _no_loss_of_a_microbatch(cls, value: object) -> object:
        if value == "aux_loss":
            raise Refused("a loss of each microbatch, which depends on the layout; use global_aux_loss or seq_aux_loss")
        return value
