"""The configuration: one schema for files, command line and API; frozen after reading.

Names are Megatron's where the concept is Megatron's.  None means: derived from other fields by RunSpec, and never
stored next to its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES, LOAD_BALANCERS, ZIGZAG
from megatron3d.errors import is_one_line
from megatron3d.parallel.mesh import CONTEXT
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, ONE_F_ONE_B, SCHEDULES
from megatron3d.runtime.arguments import MAX_NUMBER, MAX_RANKS, MAX_SEED

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


DataPath = str | Annotated[tuple[str | float, ...], Field(strict=False)]


class DataConfig(Section):
    """The corpus and its tokenizer."""

    data_path: DataPath | None = Field(
        None, description="prefix of a .bin/.idx pair, or a blend of several, each after its weight"
    )
    split: str = Field("969,30,1", description="weights of train, valid and test")
    train_data_path: DataPath | None = Field(
        None, description="instead of data_path and split; `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]` streams a dataset"
    )
    valid_data_path: DataPath | None = Field(None, description="with train_data_path")
    test_data_path: DataPath | None = Field(None, description="with train_data_path")
    stream_key: str = Field("text", description="text column of a streamed dataset (hf:...)")
    stream_lanes: int = Field(8, ge=1, description="lanes of a streamed dataset that are read in parallel")
    stream_shuffle_rows: int = Field(
        1000, ge=1, description="size of the shuffle buffer of a streamed dataset, in rows"
    )
    on_bad_record: Literal["stop", "skip"] = Field(
        "stop", description="a bad row of a streamed dataset: stop, or skip and count it"
    )
    max_epochs: float = Field(4.0, gt=0, description="warn at launch if a corpus is read for more epochs than this")
    reset_position_ids: bool = Field(False, description="restart position ids at each document")
    reset_attention_mask: bool = Field(False, description="attend only within a document")
    mean_document_length: int | None = Field(
        None,
        ge=1,
        description="with reset_attention_mask: tokens of a document, by which predictions count attention; default: "
        "documents of the corpus in a run, whole sequences before it is read",
    )
    eod_mask_loss: bool = Field(False, description="no loss on the token that follows the end of a document")
    pad_token_id: int | None = Field(None, ge=0, description="no loss on this token; default: none")
    goldfish_k: int | None = Field(
        None, ge=2, description="goldfish loss: one of k tokens is excluded from the loss; default: none"
    )
    goldfish_h: int = Field(13, ge=1, description="goldfish loss: context tokens whose hash decides on the next one")
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer"
    ] = "SentencePieceTokenizer"
    tokenizer_model: str | None = Field(
        None, description="tokenizer file; a mere file name is first looked for next to this file"
    )
    add_bos_token: bool | None = Field(
        None,
        description="begin prompts and streamed documents with the tokenizer's bos token; default: as it declares",
    )


class CheckpointConfig(Section):
    """Folders and options for saving and loading checkpoints."""

    save: str | None = None
    load: str | None = Field(
        None,
        description="a run, its checkpoint, or with finetune a Hugging Face folder; if equal to save: resume from the "
        "newest checkpoint there, if any",
    )
    save_interval: int | None = Field(None, ge=1, description="default: only at the end")
    non_persistent_save_interval: int | None = Field(
        None, ge=1, description="iterations between short-lived checkpoints in `non_persistent` of save; default: none"
    )
    keep_latest_k: int | None = Field(None, ge=1, description="number of permanent checkpoints to keep; default: all")
    save_retain_interval: int | None = Field(
        None, ge=1, description="keep checkpoints at its multiples permanently, next to the newest keep_latest_k (or 1)"
    )
    async_save: bool = Field(
        False, description="write in the background; training waits only for the copy to CPU memory"
    )
    finetune: bool = Field(False, description="load weights only; iteration, optimizer and data start from scratch")
    no_load_optim: bool = Field(False, description="load without optimizer state and loss scale")
    accept_changed: tuple[Literal["tokenizer", "corpus", "data.split", "train.seed"], ...] = Field(
        (), strict=False, description="what may differ from the run that is continued, which then reads other samples"
    )


class LoggingConfig(Section):
    """Reported values, and the outputs that they are written to."""

    log_interval: int = Field(10, ge=1)
    timing_log_level: Literal[0, 1, 2] = Field(
        1, description="phase timers: 0 off, 1 in metrics.jsonl, 2 also on the console"
    )
    straggler_factor: float | None = Field(
        1.5, gt=1, description="a rank is a straggler above this multiple of its peers' median time; null: no detection"
    )
    straggler_steps: int = Field(5, ge=1, description="consecutive logged steps before a straggler is reported")
    trace_iterations: tuple[Positive, ...] = Field(
        (), strict=False, description="iterations whose pipeline is traced and plotted in `traces` of checkpoint.save"
    )
    log_moments_interval: int | None = Field(
        None,
        ge=1,
        description="iterations between statistics of each layer's parameters, gradients and activations",
    )
    profile: bool = Field(False, description="write torch.profiler traces to `profiles` of checkpoint.save")
    profile_step_start: int = Field(10, ge=1, description="first profiled iteration")
    profile_step_end: int = Field(12, ge=2, description="iteration before which profiling stops")
    profile_ranks: tuple[Count, ...] = Field((0,), strict=False, min_length=1, description="profiled ranks")
    record_memory_history: bool = Field(
        False, description="with profile: snapshot of the allocator's history in these iterations; GPUs only"
    )
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    cluster: str | None = Field(
        None, description="description in hardware/clusters for step time prediction; default: local, if calibrated"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="dense peak per device, for MFU; default: from the device's name"
    )


def _known_mode(name: str) -> str:
    if name not in MODES:
        raise ValueError(f"the modes are {', '.join(MODES)}")
    return name


def _known_schedule(name: str) -> str:
    if name not in (*SCHEDULES, FROM_FILE):
        raise ValueError(f"the schedules are {', '.join((*SCHEDULES, FROM_FILE))}")
    return name


def _known_exchange(name: str) -> str:
    if name not in CONTEXT_EXCHANGES:
        raise ValueError(f"the exchanges are {', '.join(CONTEXT_EXCHANGES)}")
    return name


def _known_balancer(name: str) -> str:
    if name not in LOAD_BALANCERS:
        raise ValueError(f"the load balancers are {', '.join(LOAD_BALANCERS)}")
    return name


BalancerName = Annotated[str, AfterValidator(_known_balancer), Field(json_schema_extra={"enum": list(LOAD_BALANCERS)})]
ExchangeName = Annotated[
    str, AfterValidator(_known_exchange), Field(json_schema_extra={"enum": list(CONTEXT_EXCHANGES)})
]
ModeName = Annotated[str, AfterValidator(_known_mode), Field(json_schema_extra={"enum": list(MODES)})]
Schedules = Field(json_schema_extra={"enum": [*SCHEDULES, FROM_FILE]})
ScheduleName = Annotated[str, AfterValidator(_known_schedule), Schedules]
HeadAndRingRanks = Annotated[tuple[Positive, Positive], Field(strict=False, examples=["[8,4]"])]
Growth = Annotated[tuple[Positive, Positive, Positive], Field(strict=False, examples=["[8,8,1000]"])]
MomentDtype = Literal["fp32", "bf16"]
# Bytes of an element of the network, by `train.precision`.
ITEMSIZES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class ParallelConfig(Section):
    """Layout of the ranks: world_size = TP x CP x PP x DP, with DP derived."""

    tensor_model_parallel_size: int | None = Field(
        None, ge=1, description="default: product of tensor_parallel_shape, or 1"
    )
    tensor_parallel_mode: ModeName = next(iter(MODES))
    tensor_parallel_shape: tuple[Positive, ...] | None = Field(
        None, strict=False, description="default: the most even shape of the size"
    )
    tensor_parallel_form: str | None = Field(None, description="variant of the mode; default: its first")
    sequence_parallel: bool = Field(False, description="same as tensor_parallel_form=sequence_parallel")
    context_parallel_size: int = Field(
        1, ge=1, description="CP: ranks that split the positions of each sequence, 2 chunks per rank"
    )
    cp_comm_type: ExchangeName = Field(
        next(iter(CONTEXT_EXCHANGES)), description="how context ranks exchange keys and values for attention"
    )
    hierarchical_context_parallel_sizes: HeadAndRingRanks | None = Field(
        None, description="of cp_comm_type a2a+p2p: ranks of a2a, which are neighbours, and of p2p"
    )
    context_parallel_load_balancer: BalancerName = Field(
        ZIGZAG,
        description="how the positions of packed sequences are divided among context ranks: zigzag, or by the work of "
        "each sequence's documents",
    )
    expert_model_parallel_size: int = Field(
        1, ge=1, description="EP: ranks among which the experts of a layer are distributed, whole ones to each"
    )
    expert_tensor_parallel_size: int = Field(
        1, ge=1, description="ETP: ranks that split each expert's matrices, neighbours of one another"
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] | None = Field(
        None, description="how tokens reach the ranks of their experts; default: what sends fewer bytes, balanced"
    )
    expert_load_imbalance: float = Field(
        1.0,
        ge=1,
        description="what predictions of time and memory assume: rows of the busiest rank of an expert group, in "
        "multiples of an even load",
    )
    pipeline_model_parallel_size: int = Field(1, ge=1)
    pipeline_schedule: ScheduleName = ONE_F_ONE_B
    virtual_pipeline_model_parallel_size: int | None = Field(
        None,
        ge=1,
        description="stages (model chunks) per pipeline rank; default: the fewest that the schedule supports",
    )
    pipeline_schedule_file: str | None = Field(None, description="CSV of actions, for pipeline_schedule=file")
    pipeline_model_parallel_layout: tuple[Count, ...] | None = Field(
        None, strict=False, description="layers per stage; default: balanced by FLOPs, the LM head included"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)"
    )
    num_distributed_optimizer_instances: int = Field(
        1, ge=1, description="HSDP: number of replicas; ZeRO shards over the data-parallel ranks of one replica"
    )
    tp_comm_overlap: bool = Field(
        False,
        description="async tensor parallelism: exposed all-gathers and reduce-scatters overlap with their own GEMM, "
        "in as many rounds as ranks",
    )
    tp_comm_overlap_input_grad: bool = Field(
        True, description="overlap the reduction of the input gradient (dgrad) with the wgrad GEMM"
    )
    tp_comm_overlap_weight_grad: bool = Field(
        True, description="overlap the reduction of the weight gradient (wgrad) with the backward of the next linear"
    )
    tp_comm_overlap_weight_gather: bool = Field(
        True, description="prefetch weights: overlap their all-gather with the previous linear, in forward and backward"
    )
    tp_keep_gathered_weights: bool = Field(
        False, description="keep weights gathered in forward until backward: one all-gather less, more memory"
    )

    @property
    def context_axes(self) -> tuple[tuple[str, int], ...]:
        """Context axes with their sizes, of which one or two may be 1; ranks of the last are neighbours."""
        inner, outer = self.hierarchical_context_parallel_sizes or (1, self.context_parallel_size)
        return tuple(zip(CONTEXT, (outer, inner), strict=True))


class TrainConfig(Section):
    """Batch, length and precision of the run."""

    micro_batch_size: int = Field(1, ge=1)
    global_batch_size: int = Field(8, ge=1)
    rampup_batch_size: Growth | None = Field(
        None, description="[start, increment, samples]: ramp-up of the global batch size"
    )
    seq_length_warmup: Growth | None = Field(
        None, description="[start, increment, samples]: ramp-up of the sequence length, to which samples are truncated"
    )
    train_iters: int = Field(1000, ge=1)
    iterations_to_skip: tuple[Positive, ...] = Field(
        (), strict=False, description="iterations whose samples are skipped: nothing is computed, logged or saved"
    )
    exit_interval: int | None = Field(None, ge=1)
    exit_duration_in_mins: float | None = Field(None, gt=0)
    rollback_nonfinite_steps: int | None = Field(
        None, ge=1, description="consecutive steps without an update before a rollback to the last good checkpoint"
    )
    rollback_loss_spike_score: float | None = Field(
        None,
        gt=0,
        description="robust standard deviations above recent losses that trigger a rollback which skips the samples",
    )
    rollback_window: int = Field(128, ge=16, description="recent losses that a new one is compared with")
    max_rollbacks: int = Field(3, ge=1, description="rollbacks per launch; one more is a failure")
    check_weight_hash_across_dp_replicas_interval: int | None = Field(
        None, ge=1, description="iterations between comparisons of data-parallel replicas, bit by bit; default: never"
    )
    seed: int = Field(1234, ge=0)
    distributed_timeout_minutes: float = Field(
        10.0, gt=0, description="time without progress after which the run ends, naming the rank"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    loss_scale: float | None = Field(None, gt=0, description="fixed loss scale, with fp16; default: dynamic")
    initial_loss_scale: float = Field(2.0**32, gt=0, description="initial value of a dynamic loss scale")
    min_loss_scale: float = Field(1.0, gt=0)
    loss_scale_window: int = Field(
        1000, ge=1, description="consecutive finite steps after which the loss scale doubles"
    )
    hysteresis: int = Field(2, ge=1, description="non-finite steps before the loss scale halves")
    eval_interval: int | None = Field(None, ge=1, description="default: never")
    eval_iters: int = Field(10, ge=1)
    loss_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens per chunk of the loss: only one chunk has logits in memory; default on CPUs: 1024",
    )
    loss_chunk_mb: float | None = Field(
        None, gt=0, description="instead: MiB of fp32 logits per chunk on each rank; default on GPUs: 1024"
    )
    bucket_mb: float | None = Field(
        None,
        gt=0,
        description="bucket size of gradient reduction over data-parallel ranks, in MiB; "
        "default: on CPUs 25, on GPUs the larger of 160 and 4 per data-parallel rank",
    )
    recompute_granularity: Literal["selective", "full"] | None = Field(
        None,
        description="activation recomputation (checkpointing): modules of each layer, or full layers; default: none",
    )
    recompute_modules: tuple[Literal["core_attn", "mlp_act", "mla_up_proj"], ...] | None = Field(
        None,
        strict=False,
        min_length=1,
        description="modules to recompute, with selective; mla_up_proj goes with core_attn; default: core_attn",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="with full: all layers in groups, or the first layers of each stage; default: uniform"
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="with full: layers per group (uniform) or per stage (block); default: 1"
    )
    manual_gc: bool = Field(
        False, description="collect Python's garbage only every manual_gc_interval iterations, on all ranks at once"
    )
    manual_gc_interval: int = Field(0, ge=0, description="with manual_gc; 0: never during training")
    deterministic_mode: bool = Field(
        False, description="kernels that give the same bits in every run; an operation without one is an error"
    )
    cpu_offloading: bool = Field(False, description="keep saved activations in CPU memory until backward; GPUs only")
    grad_reduce_in_bf16: bool = Field(
        False, description="communicate gradients in bf16; they are still accumulated in fp32"
    )
    tp_grad_reduce_in_bf16: bool = Field(
        False, description="with bf16: reduce weight gradients over tensor axes in bf16, half the bytes of fp32"
    )
    norm_implementation: Literal["torch", "apex"] = Field(
        "torch", description="fused LayerNorm and RMSNorm where features are not sharded: PyTorch's, or NVIDIA apex's"
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="torch.compile each layer; auto: on GPUs, not on CPUs; what does not compile is an error"
    )


class OptimizerConfig(Section):
    """Update rule of the weights and its learning-rate schedule."""

    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    lr_warmup_iters: int = Field(0, ge=0)
    lr_decay_iters: int | None = Field(None, ge=1, description="default: train_iters")
    lr_wsd_decay_iters: int | None = Field(
        None, ge=1, description="iterations of the WSD decay phase; default: a tenth of lr_decay_iters"
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "linear", description="shape of the WSD decay phase"
    )
    optimizer: Literal["adam"] = Field("adam", description="update rule: AdamW")
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="maximum global gradient norm; 0: no clipping")
    exp_avg_dtype: MomentDtype | None = Field(
        None, description="dtype of the first moment; default: that of the master weights"
    )
    exp_avg_sq_dtype: MomentDtype | None = Field(
        None, description="dtype of the second moment; default: that of the master weights"
    )
    adam_implementation: Literal["torch", "apex"] = Field(
        "torch",
        description="fused kernel: PyTorch's, or NVIDIA apex's (built from source, not the PyPI package of that name)",
    )


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
