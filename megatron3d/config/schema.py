"""The configuration: one schema for files, command line and API; frozen after reading.

Names are Megatron's where the concept is Megatron's.  None means: derived from other fields by RunSpec, and never
stored next to its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megatron3d.config.io_schema import CheckpointConfig, DataConfig, LoggingConfig
from megatron3d.config.model_schema import ModelConfig
from megatron3d.config.section import Count, Positive, Section
from megatron3d.parallel.context import CONTEXT_EXCHANGES, LOAD_BALANCERS, ZIGZAG
from megatron3d.parallel.mesh import CONTEXT
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
    tp_num_panels: int = Field(
        1, ge=1, description="panels per matmul, the communication of one overlapping the GEMM of another; 1: no panels"
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
    """AdamW and its learning-rate schedule."""

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
