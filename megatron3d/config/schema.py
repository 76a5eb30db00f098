"""The configuration: one schema for files, command line and API; frozen after reading.

Names are Megatron's where the concept is Megatron's.  None means: derived from other fields by RunSpec, and never
stored next to its source.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES


def _known_mode(name: str) -> str:
    if name not in MODES:
        raise ValueError(f"the modes are {', '.join(MODES)}")
    return name


def _known_schedule(name: str) -> str:
    if name not in (*SCHEDULES, FROM_FILE):
        raise ValueError(f"the schedules are {', '.join((*SCHEDULES, FROM_FILE))}")
    return name


ModeName = Annotated[str, AfterValidator(_known_mode), Field(json_schema_extra={"enum": list(MODES)})]
Schedules = Field(json_schema_extra={"enum": [*SCHEDULES, FROM_FILE]})
ScheduleName = Annotated[str, AfterValidator(_known_schedule), Schedules]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Growth = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]
MomentDtype = Literal["fp32", "bf16"]
DataPath = str | Annotated[tuple[str | float, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, types are not converted, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
    kv_channels: int | None = Field(None, ge=1, description="size of a head; default: hidden / heads")
    seq_length: int = Field(1024, ge=1)
    max_position_embeddings: int | None = Field(None, ge=1, description="default: seq_length")
    vocab_size: int | None = Field(None, ge=1, description="default: the tokenizer's")
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = Field(
        None, description="default: the family's"
    )
    rotary_base: float = Field(10000.0, gt=0)
    normalization: Literal["LayerNorm", "RMSNorm"] | None = Field(None, description="default: the family's")
    norm_epsilon: float = Field(1e-5, gt=0)
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] | None = Field(
        None, description="default: the family's"
    )
    add_bias_linear: bool | None = Field(None, description="default: the family's")
    tie_embeddings: bool | None = Field(None, description="default: the family's")
    qk_layernorm: bool = False
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    init_method_std: float = Field(0.02, gt=0)


class ParallelConfig(Section):
    """Layout of the ranks: world_size = TP x PP x DP, with DP derived."""

    tensor_model_parallel_size: int | None = Field(
        None, ge=1, description="default: product of tensor_parallel_shape, or 1"
    )
    tensor_parallel_mode: ModeName = next(iter(MODES))
    tensor_parallel_shape: tuple[Positive, ...] | None = Field(
        None, strict=False, description="default: the most even shape of the size"
    )
    tensor_parallel_form: str | None = Field(None, description="variant of the mode; default: its first")
    sequence_parallel: bool = Field(False, description="same as tensor_parallel_form=sequence_parallel")
    pipeline_model_parallel_size: int = Field(1, ge=1)
    pipeline_schedule: ScheduleName = "1f1b"
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
    tp_num_panels: int = Field(
        1, ge=1, description="panels per matmul, the communication of one overlapping the GEMM of another; 1: no panels"
    )


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
    loss_chunk_tokens: int = Field(
        1024, ge=1, description="tokens per chunk of the loss: only one chunk of logits is in memory at once"
    )
    bucket_mb: float = Field(
        25.0, gt=0, description="bucket size of gradient reduction over data-parallel ranks, in MiB"
    )
    recompute_granularity: Literal["selective", "full"] | None = Field(
        None,
        description="activation recomputation (checkpointing): modules of each layer, or full layers; default: none",
    )
    recompute_modules: tuple[Literal["core_attn", "mlp_act"], ...] | None = Field(
        None, strict=False, min_length=1, description="modules to recompute, with selective; default: core_attn"
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="with full: all layers in groups, or the first layers of each stage; default: uniform"
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="with full: layers per group (uniform) or per stage (block); default: 1"
    )
    cpu_offloading: bool = Field(False, description="keep saved activations in CPU memory until backward; GPUs only")
    grad_reduce_in_bf16: bool = Field(
        False, description="communicate gradients in bf16; they are still accumulated in fp32"
    )
    norm_implementation: Literal["torch", "apex"] = Field(
        "torch", description="fused LayerNorm and RMSNorm where features are not sharded: PyTorch's, or NVIDIA apex's"
    )
    compile: bool = Field(False, description="torch.compile each layer; where that fails, warn and run eagerly")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    lr_warmup_iters: int = Field(0, ge=0)
    lr_decay_iters: int | None = Field(None, ge=1, description="default: train_iters")
    lr_wsd_decay_iters: int | None = Field(
        None, ge=1, description="iterations of the WSD decay phase; default: a tenth of lr_decay_iters"
    )
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


class DataConfig(Section):
    """The corpus and its tokenizer."""

    data_path: DataPath | None = Field(
        None, description="prefix of a .bin/.idx pair, or a blend of several, each after its weight"
    )
    split: str = Field("969,30,1", description="weights of train, valid and test")
    train_data_path: DataPath | None = Field(
        None, description="in place of data_path and split; `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]` is read as a stream"
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
    eod_mask_loss: bool = Field(False, description="no loss on the token that follows the end of a document")
    pad_token_id: int | None = Field(None, ge=0, description="no loss on this token; default: none")
    goldfish_k: int | None = Field(
        None, ge=2, description="goldfish loss: one of k tokens is excluded from the loss; default: none"
    )
    goldfish_h: int = Field(13, ge=1, description="goldfish loss: context tokens whose hash decides on the next one")
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer"
    ] = "SentencePieceTokenizer"
    tokenizer_model: str | None = Field(None, description="tokenizer file; none for ByteTokenizer")


class CheckpointConfig(Section):
    """Where checkpoints are saved and loaded."""

    save: str | None = None
    load: str | None = Field(None, description="if equal to save: resume from the newest checkpoint there, if any")
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
    """What is reported, and where."""

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


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
