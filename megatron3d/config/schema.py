"""The configuration: one schema for files, command line and API; frozen after reading.

Names are Megatron's where the concept is.  None means: derived from other fields, in derive.py and never stored next
to its source.
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
    """A section refuses unknown keys, converts nothing silently and cannot be changed."""

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
    """How ranks are arranged: world_size = TP x PP x DP, with DP derived."""

    tensor_model_parallel_size: int | None = Field(
        None, ge=1, description="default: product of tensor_parallel_shape, or 1"
    )
    tensor_parallel_mode: ModeName = next(iter(MODES))
    tensor_parallel_shape: tuple[Positive, ...] | None = Field(
        None, strict=False, description="default: the most even shape of the size"
    )
    tensor_parallel_form: str | None = Field(None, description="variant of the mode; default: its first")
    sequence_parallel: bool = Field(False, description="short for tensor_parallel_form=sequence_parallel")
    pipeline_model_parallel_size: int = Field(1, ge=1)
    pipeline_schedule: ScheduleName = "1f1b"
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=1, description="stages per pipeline rank; default: the fewest that the schedule takes"
    )
    pipeline_schedule_file: str | None = Field(None, description="CSV of actions, for pipeline_schedule=file")
    pipeline_model_parallel_layout: tuple[Count, ...] | None = Field(
        None, strict=False, description="layers per stage; default: divided by cost, the head included"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="what data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too"
    )
    num_distributed_optimizer_instances: int = Field(
        1, ge=1, description="groups of data-parallel ranks that each hold everything; ZeRO shares out inside of them"
    )
    tp_comm_overlap_input_grad: bool = Field(
        True, description="a linear's input gradient is reduced under the product of its weight's gradient"
    )
    tp_comm_overlap_weight_grad: bool = Field(
        True, description="a linear's weight gradient is reduced under the backward of the next one"
    )
    tp_comm_overlap_weight_gather: bool = Field(
        True, description="a linear's weight is gathered under the linear before, in forward and in backward"
    )
    tp_keep_gathered_weights: bool = Field(
        False, description="weights that are gathered in forward stay for backward: fewer bytes move, more are held"
    )
    tp_num_panels: int = Field(
        1, ge=1, description="pieces in which matmuls gather and reduce, each under the product of another; 1: whole"
    )


class TrainConfig(Section):
    """Batch, length and precision of the run."""

    micro_batch_size: int = Field(1, ge=1)
    global_batch_size: int = Field(8, ge=1)
    rampup_batch_size: Growth | None = Field(None, description="[start, increment, samples] of a batch that grows")
    seq_length_warmup: Growth | None = Field(None, description="the same of a length that samples are cut to")
    train_iters: int = Field(1000, ge=1)
    iterations_to_skip: tuple[Positive, ...] = Field(
        (), strict=False, description="iterations whose samples are passed over: nothing is computed, logged or saved"
    )
    exit_interval: int | None = Field(None, ge=1)
    exit_duration_in_mins: float | None = Field(None, gt=0)
    rollback_nonfinite_steps: int | None = Field(
        None, ge=1, description="steps in a row without an update, after which to go back to the last good checkpoint"
    )
    rollback_loss_spike_score: float | None = Field(
        None, gt=0, description="robust deviations above the last losses, from which to go back and skip these samples"
    )
    rollback_window: int = Field(128, ge=16, description="losses that a new one is compared with")
    max_rollbacks: int = Field(3, ge=1, description="of one start; after that it is a failure")
    check_weight_hash_across_dp_replicas_interval: int | None = Field(
        None, ge=1, description="iterations between comparisons of data-parallel replicas, bit by bit; default: never"
    )
    seed: int = Field(1234, ge=0)
    distributed_timeout_minutes: float = Field(
        10.0, gt=0, description="a rank without any progress for so long ends the run, and is named"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    loss_scale: float | None = Field(None, gt=0, description="fixed, with fp16; default: a dynamic one")
    initial_loss_scale: float = Field(2.0**32, gt=0, description="where a dynamic loss scale begins")
    min_loss_scale: float = Field(1.0, gt=0)
    loss_scale_window: int = Field(1000, ge=1, description="good steps in a row after which the loss scale doubles")
    hysteresis: int = Field(2, ge=1, description="non-finite steps before the loss scale halves")
    eval_interval: int | None = Field(None, ge=1, description="default: never")
    eval_iters: int = Field(10, ge=1)
    loss_chunk_tokens: int = Field(1024, ge=1, description="tokens whose logits exist at one time")
    bucket_mb: float = Field(25.0, gt=0, description="size of a gradient all-reduce on the data axis")
    recompute_granularity: Literal["selective", "full"] | None = Field(
        None, description="what backward computes again: some modules of each layer, or layers; default: nothing"
    )
    recompute_modules: tuple[Literal["core_attn", "mlp_act"], ...] | None = Field(
        None, strict=False, min_length=1, description="with selective; default: core_attn"
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="with full: all layers in runs, or the first of each stage one by one; default: uniform"
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="with full: layers of a run, or recomputed ones of a stage; default: 1"
    )
    cpu_offloading: bool = Field(False, description="what layers keep for backward lies in host memory; GPUs only")
    grad_reduce_in_bf16: bool = Field(False, description="gradients on their way; they are summed up in fp32")
    norm_implementation: Literal["torch", "apex"] = Field(
        "torch", description="whose fused LayerNorm and RMSNorm where features are whole; apex is NVIDIA's"
    )
    compile: bool = Field(False, description="torch.compile of each layer; eager, and said so, where that fails")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    lr_warmup_iters: int = Field(0, ge=0)
    lr_decay_iters: int | None = Field(None, ge=1, description="default: train_iters")
    lr_wsd_decay_iters: int | None = Field(
        None, ge=1, description="length of WSD's last phase; default: a tenth of lr_decay_iters"
    )
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    exp_avg_dtype: MomentDtype | None = Field(None, description="default: that of the main weights")
    exp_avg_sq_dtype: MomentDtype | None = Field(None, description="default: that of the main weights")
    adam_implementation: Literal["torch", "apex"] = Field(
        "torch", description="whose fused kernel; apex is NVIDIA's, compiled, not the package of that name on PyPI"
    )


class DataConfig(Section):
    """The corpus and its tokenizer."""

    data_path: DataPath | None = Field(None, description="prefix of .bin and .idx, or several, each after its weight")
    split: str = Field("969,30,1", description="weights of train, valid and test")
    train_data_path: DataPath | None = Field(
        None, description="in place of data_path and split; `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]` is read as a stream"
    )
    valid_data_path: DataPath | None = Field(None, description="with train_data_path")
    test_data_path: DataPath | None = Field(None, description="with train_data_path")
    stream_key: str = Field("text", description="column with the text, where a path is the name of a dataset, hf:...")
    stream_lanes: int = Field(8, ge=1, description="parts in which a dataset is read at one time")
    stream_shuffle_rows: int = Field(1000, ge=1, description="neighbouring rows of a dataset that are shuffled")
    on_bad_record: Literal["stop", "skip"] = Field("stop", description="rows of a dataset; skip: left out, counted")
    max_epochs: float = Field(4.0, gt=0, description="above so many readings of a corpus the start warns")
    reset_position_ids: bool = Field(False, description="positions begin anew at each document")
    reset_attention_mask: bool = Field(False, description="tokens see their own document only")
    eod_mask_loss: bool = Field(False, description="what follows the end of a document is not learnt")
    pad_token_id: int | None = Field(None, ge=0, description="a token that is not learnt; default: none")
    goldfish_k: int | None = Field(None, ge=2, description="one of k tokens is never learnt; default: all are")
    goldfish_h: int = Field(13, ge=1, description="tokens whose hash decides whether the next one is learnt")
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer"
    ] = "SentencePieceTokenizer"
    tokenizer_model: str | None = Field(None, description="file of the tokenizer; none for ByteTokenizer")


class CheckpointConfig(Section):
    """Where the run is written and read."""

    save: str | None = None
    load: str | None = Field(None, description="equal to save: resume if something is there")
    save_interval: int | None = Field(None, ge=1, description="default: only at the end")
    non_persistent_save_interval: int | None = Field(
        None, ge=1, description="short-lived checkpoints between these, in `non_persistent` of save; default: none"
    )
    keep_latest_k: int | None = Field(
        None, ge=1, description="older permanent checkpoints are removed; default: all stay"
    )
    save_retain_interval: int | None = Field(
        None, ge=1, description="checkpoints of its multiples stay for ever, beside the newest keep_latest_k, or 1"
    )
    async_save: bool = Field(False, description="training waits only until its state is copied to host memory")
    finetune: bool = Field(False, description="load weights only: iteration, optimizer and data begin anew")
    no_load_optim: bool = Field(False, description="load without the optimizer's moments and the loss scale")
    accept_changed: tuple[Literal["tokenizer", "corpus", "data.split", "train.seed"], ...] = Field(
        (), strict=False, description="what may differ from the run that is continued; its samples are then others"
    )


class LoggingConfig(Section):
    """What is reported, and where to."""

    log_interval: int = Field(10, ge=1)
    timing_log_level: Literal[0, 1, 2] = Field(
        1, description="times of phases: 0 not noted, 1 in metrics.jsonl, 2 on the console as well"
    )
    straggler_factor: float | None = Field(
        1.5, gt=1, description="a rank whose own time is so many times its peers' median is slow; null: not looked for"
    )
    straggler_steps: int = Field(5, ge=1, description="logged steps in a row, after which a slow rank is named")
    trace_iterations: tuple[Positive, ...] = Field(
        (), strict=False, description="iterations whose pipeline is logged and drawn, into `traces` of checkpoint.save"
    )
    log_moments_interval: int | None = Field(
        None,
        ge=1,
        description="iterations between moments of each layer's parameters, gradients and activations",
    )
    profile: bool = Field(False, description="torch.profiler's trace of some iterations, into `profiles` of save")
    profile_step_start: int = Field(10, ge=1, description="first iteration that is profiled")
    profile_step_end: int = Field(12, ge=2, description="iteration before which profiling ends")
    profile_ranks: tuple[Count, ...] = Field((0,), strict=False, min_length=1, description="ranks that are profiled")
    record_memory_history: bool = Field(
        False, description="with profile, a snapshot of every allocation in these iterations; GPUs only"
    )
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    cluster: str | None = Field(
        None, description="file of hardware/clusters, by which step times are predicted; default: local, if calibrated"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="per device, dense, for MFU; default: from the device's name"
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
