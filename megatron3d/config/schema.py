"""The configuration: one schema for files, command line and API; frozen after reading.

Names are Megatron's where the concept is Megatron's.  None means: derived from other fields by RunSpec, and never
stored next to its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES, LOAD_BALANCERS, ZIGZAG
from megatron3d.errors import is_one_line
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.model.option_table import MAX_LAYERS, FamilyOption, ModelOptions, option
from megatron3d.parallel.mesh import CONTEXT
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from megatron3d.runtime.arguments import MAX_NUMBER, MAX_RANKS, MAX_SEED

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]

# Characters of a text, more than a path may have.
MAX_TEXT = 4096


class Refused(ValueError):
    """A value that the rule of its key refuses; the message is the reason and a change that works."""


class Section(BaseModel, frozen=True):
    """Base of all sections: unknown keys are refused, types are not converted, and values cannot be changed.

    Text has at least one character and none that would harm a terminal, a log or a job script.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_min_length=1)

    @field_validator("*")
    @classmethod
    def _within_limits(cls, value: object, info: ValidationInfo) -> object:
        """Return the value; raises ValueError for text that is not printable or too long, and for extreme numbers."""
        limits = declared(cls.model_fields[str(info.field_name)])
        most = limits.get("most", MAX_NUMBER)
        if value not in limits.get("enum", (value,)):
            raise ValueError("not one of the choices")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and not is_one_line(item):
                raise ValueError("control characters")
            if isinstance(item, str) and len(item) > MAX_TEXT:
                raise Refused(f"{len(item)} characters; use at most {MAX_TEXT}")
            if isinstance(item, int | float) and abs(item) > most:
                raise Refused(f"more than {most}, the largest that is allowed; use {most} or less")
        return value


def key(default: Any, description: str | None = None, **limits: Any) -> Any:
    """Declare a key of the configuration, as `option` does."""
    return option(description, default=default, **limits)


def declared(field: FieldInfo) -> Mapping[str, Any]:
    """Return what `option` declares of a key besides the limits of pydantic."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


Window = Annotated[tuple[Count, Count], Field(strict=False, examples=["[127,0]"])]
BalanceLoss = Literal["none", "seq_aux_loss", "global_aux_loss", "aux_loss"]
BalanceLosses = Annotated[
    tuple[Literal["seq_aux_loss", "global_aux_loss", "aux_loss"], ...], Field(strict=False, min_length=1)
]
NonNegative = Annotated[float, Field(ge=0)]
NonNegatives = Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1, examples=["[0.01,0.001]"])]
PairFactors = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False, min_length=1, examples=["[1.0,4.0]"])
]
LayerPattern = Annotated[tuple[Literal[0, 1], ...], Field(strict=False, min_length=1)]


class ModelConfig(Section, ModelOptions, FamilyOption, frozen=True):
    """The network."""

    # Besides the options of the architecture: keys that its other values follow from.

    multi_latent_attention: bool = key(
        False, "keys and values of all heads come from one latent of each token, which generation caches"
    )
    make_vocab_size_divisible_by: int = key(128, ge=1, most=10**6)
    no_rope_freq: Positive | LayerPattern | None = key(
        None,
        "layers without RoPE: every n-th, or those with a 1 in a list that repeats over depth",
        most=MAX_LAYERS,
        also="no_rope_layer_interval no_rope_layers",
    )
    rotary_scaling: Literal["linear", "llama3", "yarn", "longrope"] | None = key(
        None,
        "scaling of RoPE for sequences longer than those of earlier training; default: none",
        also="rope_scaling use_rope_scaling rope_type",
    )
    rotary_scaling_factor: float | None = key(
        None,
        "with rotary_scaling: the longest rotations become this much slower; with longrope only "
        "rotary_attention_factor follows from it, default: max_position_embeddings / original_max_position_embeddings",
        ge=1,
        also="rope_scaling_factor",
    )
    original_max_position_embeddings: int | None = key(
        None,
        "with llama3, yarn and longrope: sequence length of earlier training",
        ge=1,
        also="original_max_position_embedding old_context_len",
    )
    rotary_low_freq_factor: float | None = key(
        None, "with llama3: fewer rotations within the original length are scaled fully; default: 1", gt=0
    )
    rotary_high_freq_factor: float | None = key(
        None, "with llama3: more rotations within the original length are not scaled; default: 4", gt=0
    )
    rotary_beta_slow: float | None = key(
        None, "with yarn: fewer rotations within the original length are scaled fully; default: 1", gt=0
    )
    rotary_beta_fast: float | None = key(
        None, "with yarn: more rotations within the original length are not scaled; default: 32", gt=0
    )
    rotary_attention_factor: float | None = key(
        None,
        "with yarn and longrope: factor of queries and of keys; default: yarn's 0.1 ln(rotary_scaling_factor) + 1, "
        "longrope's root of 1 + ln(rotary_scaling_factor) / ln(original_max_position_embeddings)",
        gt=0,
    )
    rotary_truncate: bool | None = key(
        None, "with yarn: round the range of interpolated channels to whole channels; default: true"
    )
    rotary_short_factor: PairFactors | None = key(
        None,
        "with longrope: what the rotation of each pair of channels is slowed down by, where seq_length is at most "
        "original_max_position_embeddings",
        also="short_factor",
    )
    rotary_long_factor: PairFactors | None = key(
        None, "with longrope: the same where seq_length is longer", also="long_factor"
    )
    window_size: Window | None = key(
        None,
        "sliding window: keys that a query sees before itself, and after itself, which is 0; [127, 0] is Hugging "
        "Face's sliding_window=128; default: all keys before it",
        most=10**7,
        also="sliding_window attention_window",
    )
    window_attn_skip_freq: Positive | LayerPattern | None = key(
        None,
        "layers without the window: every n-th, or those with a 0 in a list that repeats over depth",
        most=MAX_LAYERS,
        also="sliding_window_pattern",
    )
    num_moe_experts: int | None = key(
        None,
        "experts of a layer; default: an MLP in every layer",
        ge=1,
        most=10**5,
        also="num_experts num_local_experts n_routed_experts",
    )
    moe_layer_freq: Positive | LayerPattern | None = key(
        None,
        "layers with experts: each n-th from the first, or those with a 1 in a list that repeats over depth; "
        "default: all",
        most=MAX_LAYERS,
    )
    moe_router_topk: int | None = key(
        None, "experts that each token is sent to; default: 2", ge=1, most=10**5, also="num_experts_per_tok top_k"
    )
    moe_ffn_hidden_size: int | None = key(
        None, "inner features of an expert; default: ffn_hidden_size", ge=1, most=10**7, also="moe_intermediate_size"
    )
    moe_shared_expert_intermediate_size: int | None = key(
        None,
        "inner features of all shared experts together, which every token is sent to",
        ge=1,
        most=10**7,
        also="shared_expert_intermediate_size",
    )
    moe_shared_expert_gate: bool = key(
        False, "multiply the shared experts' output by the sigmoid of a projection of their input"
    )
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = key(
        "softmax", "scores of experts; the chosen ones are normalized, but see moe_router_pre_softmax"
    )
    moe_router_bias: bool = key(False, "the router's logits have a bias, a parameter of the model")
    moe_router_pre_softmax: bool = key(
        False, "softmax over all experts before the choice, and no normalization over the chosen ones"
    )
    moe_router_num_groups: int | None = key(
        None,
        "groups of experts, of which each token chooses from the best moe_router_group_topk",
        ge=1,
        most=10**5,
        also="n_group",
    )
    moe_router_group_topk: int | None = key(
        None, "with moe_router_num_groups: groups of a token", ge=1, most=10**5, also="topk_group"
    )
    moe_router_group_score_topk: int | None = key(
        None,
        "with moe_router_num_groups: best scores of a group whose sum is its score; default: moe_router_topk / "
        "moe_router_group_topk",
        ge=1,
        most=10**5,
    )
    moe_router_topk_scaling_factor: float | None = key(
        None, "factor of the chosen experts' weights; default: 1", gt=0, also="routed_scaling_factor"
    )
    moe_apply_probs_on_input: bool = key(
        False, "multiply the inputs of the chosen experts by their weights, not their outputs"
    )
    moe_router_load_balancing_type: BalanceLoss | BalanceLosses = key(
        "none",
        "loss that balances the experts' load, or a list of losses: of each sequence, of the global batch with the "
        "load of the step before, or (aux_loss) of each microbatch, which depends on the layout",
    )
    moe_router_enable_expert_bias: bool = key(
        False,
        "balance without a loss: a bias of each expert, in the choice alone, moves towards an even load at each step",
    )
    moe_router_bias_update_rate: float | None = key(
        None, "with moe_router_enable_expert_bias: how far it moves; default: 0.001", ge=0
    )
    moe_expert_capacity_factor: float | None = key(
        None,
        "in training, the most tokens of a sequence that an expert takes, in multiples of an even load; others "
        "of its tokens are dropped by it; default: none are",
        gt=0,
        most=10**5,
        also="capacity_factor moe_capacity_factor expert_capacity",
    )
    moe_token_drop_policy: Literal["probs", "position"] = key(
        "probs", "with moe_expert_capacity_factor: an expert takes the tokens of the largest weights, or the first ones"
    )
    moe_pad_expert_input_to_capacity: bool = key(
        False, "with moe_expert_capacity_factor: rows of zeros fill each expert up to its capacity in training"
    )
    moe_router_force_load_balancing: bool = key(
        False, "for measurements of speed only: tokens go to the experts in turn, whatever their routers say"
    )
    moe_aux_loss_coeff: NonNegative | NonNegatives = key(
        0.0, "factor of the loss of moe_router_load_balancing_type, or a list of one for each"
    )
    moe_z_loss_coeff: float = key(0.0, "factor of the router's z-loss; 0: none", ge=0)


DataPath = str | Annotated[tuple[str | float, ...], Field(strict=False)]


class DataConfig(Section, frozen=True):
    """The corpus and its tokenizer."""

    data_path: DataPath | None = key(
        None,
        "prefix of a .bin/.idx pair, or a blend of several, each after its weight",
        also="dataset dataset_path train_data_path",
    )
    split: str = key("969,30,1", "weights of train, valid and test")
    train_data_path: DataPath | None = key(
        None, "instead of data_path and split; `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]` streams a dataset"
    )
    valid_data_path: DataPath | None = key(None, "with train_data_path")
    test_data_path: DataPath | None = key(None, "with train_data_path")
    stream_key: str = key("text", "text column of a streamed dataset (hf:...)")
    stream_lanes: int = key(8, "lanes of a streamed dataset that are read in parallel", ge=1, most=10_000)
    stream_shuffle_rows: int = key(1000, "size of the shuffle buffer of a streamed dataset, in rows", ge=1, most=10**9)
    on_bad_record: Literal["stop", "skip"] = key("stop", "a bad row of a streamed dataset: stop, or skip and count it")
    max_epochs: float = key(4.0, "warn at launch if a corpus is read for more epochs than this", gt=0)
    reset_position_ids: bool = key(False, "restart position ids at each document")
    reset_attention_mask: bool = key(False, "attend only within a document")
    mean_document_length: int | None = key(
        None,
        "with reset_attention_mask: tokens of a document, by which predictions count attention; default: "
        "documents of the corpus in a run, whole sequences before it is read",
        ge=1,
        most=10**9,
    )
    eod_mask_loss: bool = key(False, "no loss on the token that follows the end of a document")
    pad_token_id: int | None = key(None, "no loss on this token; default: none", ge=0)
    goldfish_k: int | None = key(None, "goldfish loss: one of k tokens is excluded from the loss; default: none", ge=2)
    goldfish_h: int = key(13, "goldfish loss: context tokens whose hash decides on the next one", ge=1, most=10_000)
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer"
    ] = key("SentencePieceTokenizer", also="tokenizer")
    tokenizer_model: str | None = key(
        None, "tokenizer file; a mere file name is first looked for next to this file", also="vocab_file tokenizer_path"
    )
    add_bos_token: bool | None = key(
        None, "begin prompts and streamed documents with the tokenizer's bos token; default: as it declares"
    )


class CheckpointConfig(Section, frozen=True):
    """Folders and options for saving and loading checkpoints."""

    save: str | None = key(None, also="out_dir output_dir checkpoints_path save_dir checkpoint.folder")
    load: str | None = key(
        None,
        "a run, its checkpoint, or with finetune a Hugging Face folder, from which the run starts; once save holds a "
        "checkpoint it resumes from the newest one there. Equal to save: start from scratch, then resume",
        also="resume resume_from load_dir init_from resume_from_checkpoint",
    )
    save_interval: int | None = key(
        None, "default: only at the end", ge=1, also="checkpoint_interval ckpt_interval save_steps checkpoint.interval"
    )
    non_persistent_save_interval: int | None = key(
        None, "iterations between short-lived checkpoints in `non_persistent` of save; default: none", ge=1
    )
    keep_latest_k: int | None = key(None, "number of permanent checkpoints to keep; default: all", ge=1)
    save_retain_interval: int | None = key(
        None, "keep checkpoints at its multiples permanently, next to the newest keep_latest_k (or 1)", ge=1
    )
    keep_best: bool = key(
        False,
        "keep the checkpoint with the lowest validation loss as well; an evaluation that finds a lower one saves",
        also="save_best load_best_model_at_end always_save_checkpoint",
    )
    async_save: bool = key(False, "write in the background; training waits only for the copy to CPU memory")
    in_memory_interval: int | None = key(
        None,
        "iterations between copies of the state in host memory, each on two ranks, from which a run goes on that has "
        "lost ranks; default: none",
        ge=1,
        also="local_checkpoint_period enable_emergency_checkpoint save_memory_interval replication",
    )
    finetune: bool = key(False, "load weights only; iteration, optimizer and data start from scratch")
    no_load_optim: bool = key(False, "load without optimizer state and loss scale")
    accept_changed: tuple[Literal["tokenizer", "corpus", "data.split", "train.seed", "optimizer"], ...] = key(
        (),
        "what may differ from the run that is continued, which then reads other samples, or, with another update rule "
        "or a new ema_decay, begins with new optimizer state",
        strict=False,
    )


class LoggingConfig(Section, frozen=True):
    """Reported values, and the outputs that they are written to."""

    log_interval: int = key(10, ge=1, also="logging_steps log_freq")
    timing_log_level: Literal[0, 1, 2] = key(1, "phase timers: 0 off, 1 in metrics.jsonl, 2 also on the console")
    straggler_factor: float | None = key(
        1.5,
        "a rank is a straggler above this multiple of its peers' median time; null: no detection",
        gt=1,
        also="log_straggler",
    )
    straggler_steps: int = key(5, "consecutive logged steps before a straggler is reported", ge=1, most=10**6)
    trace_iterations: tuple[Positive, ...] = key(
        (), "iterations whose pipeline is traced and plotted in `traces` of checkpoint.save", strict=False
    )
    log_moments_interval: int | None = key(
        None,
        "iterations between statistics of each layer's parameters, gradients and activations",
        ge=1,
        also="log_params_norm log_num_zeros_in_grad",
    )
    fp8_stats_interval: int | None = key(
        None,
        "with fp8: iterations between counts of saturated and underflowed elements of the operands of each linear; "
        "layers are not compiled then; default: never",
        ge=1,
    )
    fp8_loss_interval: int | None = key(
        None,
        "with fp8: iterations between comparisons of a step's loss with that of linears that multiply in precision, "
        "each of which takes the step's forward once more; default: never",
        ge=1,
    )
    noise_scale_interval: int | None = key(
        None,
        "iterations between measurements of the gradient noise scale, each of which takes a step's forward and "
        "backward once more; default: never",
        ge=1,
    )
    noise_scale_batch_size: int | None = key(
        None, "with noise_scale_interval: samples of the smaller batches that the global batch is divided into", ge=1
    )
    profile: bool = key(False, "write torch.profiler traces to `profiles` of checkpoint.save")
    profile_step_start: int = key(10, "first profiled iteration", ge=1)
    profile_step_end: int = key(12, "iteration before which profiling stops", ge=2)
    profile_ranks: tuple[Count, ...] = key((0,), "profiled ranks", strict=False, min_length=1, most=MAX_RANKS)
    record_memory_history: bool = key(
        False, "with profile: snapshot of the allocator's history in these iterations; GPUs only"
    )
    tensorboard_dir: str | None = key(None, also="enable_tensorboard")
    wandb_project: str | None = key(None, also="wandb_log")
    wandb_name: str | None = key(None, also="wandb_run_name wandb_exp_name run_name")
    wandb_mode: Literal["online", "offline"] = key("online", "online: unless the variable WANDB_MODE says otherwise")
    cluster: str | None = key(
        None, "description in hardware/clusters for step time prediction; default: local, if calibrated"
    )
    peak_tflops: float | None = key(None, "dense peak per device, for MFU; default: from the device's name", gt=0)


HeadAndRingRanks = Annotated[tuple[Positive, Positive], Field(strict=False, examples=["[8,4]"])]
Growth = Annotated[tuple[Positive, Positive, Positive], Field(strict=False, examples=["[8,8,1000]"])]
RecomputeModules = tuple[
    Literal["core_attn", "mlp_act", "mla_up_proj", "moe_act", "shared_experts", "moe", "mlp", "layernorm"], ...
]
MomentDtype = Literal["fp32", "bf16"]
# Iterations of a run that names neither iterations nor samples.
DEFAULT_ITERS = 1000
# Bytes of an element of the network, by `train.precision`.
ITEMSIZES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class ParallelConfig(Section, frozen=True):
    """Layout of the ranks: world_size = TP x CP x PP x DP, with DP derived."""

    tensor_model_parallel_size: int | None = key(
        None,
        "default: product of tensor_parallel_shape, or 1",
        ge=1,
        most=MAX_RANKS,
        also="tp tp_size tensor_parallel_size tensor_parallel_degree",
    )
    tensor_parallel_mode: str = key(next(iter(MODES)), choices=MODES, also="tp_mode tensor_mode")
    tensor_parallel_shape: tuple[Positive, ...] | None = key(
        None, "default: the most even shape of the size", strict=False, most=MAX_RANKS, also="tp_shape tensor_shape"
    )
    tensor_parallel_form: str | None = key(None, "variant of the mode; default: its first")
    sequence_parallel: bool = key(False, "same as tensor_parallel_form=sequence_parallel", also="sp")
    context_parallel_size: int = key(
        1, "CP: ranks that split the positions of each sequence, 2 chunks per rank", ge=1, most=MAX_RANKS
    )
    cp_comm_type: str = key(
        next(iter(CONTEXT_EXCHANGES)),
        "how context ranks exchange keys and values for attention",
        choices=CONTEXT_EXCHANGES,
    )
    hierarchical_context_parallel_sizes: HeadAndRingRanks | None = key(
        None, "of cp_comm_type a2a+p2p: ranks of a2a, which are neighbours, and of p2p", most=MAX_RANKS
    )
    context_parallel_load_balancer: str = key(
        ZIGZAG,
        "how the positions of packed sequences are divided among context ranks: zigzag, or by the work of each "
        "sequence's documents",
        choices=LOAD_BALANCERS,
    )
    expert_model_parallel_size: int = key(
        1, "EP: ranks among which the experts of a layer are distributed, whole ones to each", ge=1, most=MAX_RANKS
    )
    expert_tensor_parallel_size: int = key(
        1, "ETP: ranks that split each expert's matrices, neighbours of one another", ge=1, most=MAX_RANKS
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] | None = key(
        None, "how tokens reach the ranks of their experts; default: what sends fewer bytes, balanced"
    )
    expert_load_imbalance: float = key(
        1.0,
        "what predictions of time and memory assume: rows of the busiest rank of an expert group, in multiples "
        "of an even load",
        ge=1,
        most=MAX_RANKS,
    )
    pipeline_model_parallel_size: int = key(
        1, ge=1, most=MAX_RANKS, also="pp pp_size pipeline_parallel_size pipeline_parallel_degree"
    )
    pipeline_schedule: str = key(
        ONE_F_ONE_B, choices=(*SCHEDULES, FROM_FILE), also="pp_schedule pipeline_parallel_schedule"
    )
    virtual_pipeline_model_parallel_size: int | None = key(
        None,
        "stages (model chunks) per pipeline rank; 1f1b with several is interleaved; default: the fewest that the "
        "schedule supports",
        ge=1,
        most=MAX_LAYERS,
        also="vp vp_size vpp num_model_chunks num_virtual_stages num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank",
    )
    pipeline_schedule_file: str | None = key(
        None, "CSV of actions, for pipeline_schedule=file", also="pipeline_parallel_schedule_csv"
    )
    pipeline_model_parallel_layout: tuple[Count, ...] | None = key(
        None,
        "layers per stage; default: balanced by FLOPs, the LM head included",
        strict=False,
        also="decoder_first_pipeline_num_layers num_layers_in_first_pipeline_stage",
    )
    zero_stage: Literal[0, 1, 2, 3] = key(
        0,
        "sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)",
        also="use_distributed_optimizer data_parallel_sharding_strategy data_parallel_shard_degree stage zero fsdp",
    )
    num_distributed_optimizer_instances: int = key(
        1,
        "HSDP: number of replicas; ZeRO shards over the data-parallel ranks of one replica",
        ge=1,
        most=MAX_RANKS,
        also="data_parallel_replicate_degree",
    )
    tp_comm_overlap: bool = key(
        False,
        "async tensor parallelism: exposed all-gathers and reduce-scatters overlap with their own GEMM, in as "
        "many rounds as ranks",
    )
    tp_comm_overlap_input_grad: bool = key(
        True, "overlap the reduction of the input gradient (dgrad) with the wgrad GEMM"
    )
    tp_comm_overlap_weight_grad: bool = key(
        True, "overlap the reduction of the weight gradient (wgrad) with the backward of the next linear"
    )
    tp_comm_overlap_weight_gather: bool = key(
        True, "prefetch weights: overlap their all-gather with the previous linear, in forward and backward"
    )
    tp_keep_gathered_weights: bool = key(
        False, "keep weights gathered in forward until backward: one all-gather less, more memory"
    )

    @model_validator(mode="before")
    @classmethod
    def _interleaved(cls, values: object) -> object:
        """Return the keys; 1F1B with several stages per rank is the interleaved schedule, as in Megatron-LM."""
        if not isinstance(values, Mapping):
            return values
        virtual, name = values.get("virtual_pipeline_model_parallel_size"), values.get("pipeline_schedule", ONE_F_ONE_B)
        is_interleaved = isinstance(virtual, int) and virtual > 1 and name == ONE_F_ONE_B
        return {**values, "pipeline_schedule": INTERLEAVED} if is_interleaved else values

    @property
    def context_axes(self) -> tuple[tuple[str, int], ...]:
        """Context axes with their sizes, of which one or two may be 1; ranks of the last are neighbours."""
        inner, outer = self.hierarchical_context_parallel_sizes or (1, self.context_parallel_size)
        return tuple(zip(CONTEXT, (outer, inner), strict=True))


class TrainConfig(Section, frozen=True):
    """Batch, length and precision of the run."""

    micro_batch_size: int = key(
        1,
        ge=1,
        most=10**6,
        also="batch_size mbs local_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size",
    )
    global_batch_size: int = key(
        8, ge=1, most=10**6, also="gbs train_batch_size total_batch_size gradient_accumulation_steps"
    )
    pad_global_batch: bool = key(
        False, "data-parallel ranks need not divide the global batch: some compute an empty microbatch in each step"
    )
    rampup_batch_size: Growth | None = key(None, "[start, increment, samples]: ramp-up of the global batch size")
    seq_length_warmup: Growth | None = key(
        None, "[start, increment, samples]: ramp-up of the sequence length, to which samples are truncated"
    )
    train_iters: int | None = key(
        None,
        f"default: those of train_samples, or {DEFAULT_ITERS}",
        ge=1,
        also="max_iters steps max_steps train_steps num_steps iterations",
    )
    train_samples: int | None = key(
        None,
        "instead of train_iters: samples of the run, of which no incomplete batch is trained on; the learning-rate "
        "schedule then counts samples",
        ge=1,
    )
    iterations_to_skip: tuple[Positive, ...] = key(
        (), "iterations whose samples are skipped: nothing is computed, logged or saved", strict=False
    )
    exit_interval: int | None = key(None, ge=1)
    exit_duration_in_mins: float | None = key(None, gt=0)
    max_nonfinite_steps: int | None = key(
        100, "consecutive steps without an update after which the run fails; null: never", ge=1
    )
    rollback_nonfinite_steps: int | None = key(
        None, "consecutive steps without an update before a rollback to the last good checkpoint", ge=1
    )
    rollback_loss_spike_score: float | None = key(
        None, "robust standard deviations above recent losses that trigger a rollback which skips the samples", gt=0
    )
    rollback_window: int = key(128, "recent losses that a new one is compared with", ge=16, most=10**6)
    max_rollbacks: int = key(3, "rollbacks per launch; one more is a failure", ge=1)
    check_weight_hash_across_dp_replicas_interval: int | None = key(
        None, "iterations between comparisons of data-parallel replicas, bit by bit; default: never", ge=1
    )
    seed: int = key(1234, ge=0, most=MAX_SEED)
    distributed_timeout_minutes: float = key(
        10.0, "time without progress after which the run ends, naming the rank", ge=0.01, most=10**6
    )
    elastic: bool = key(
        False,
        "go on in another layout, with the same global batch, when ranks are lost; not under torchrun, which restarts "
        "all ranks",
        also="fault_tolerance elastic_training",
    )
    on_straggler: Literal["report", "replan"] = key(
        "report",
        "answer to a straggler (logging.straggler_factor): report it, or also go on without it where that gains time",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = key(
        "fp32", also="dtype bf16 fp16 params_dtype mixed_precision mixed_precision_param torch_dtype"
    )
    fp8: Literal["e4m3", "hybrid"] | None = key(
        None,
        "linears of layers multiply in fp8, all in e4m3, or with output gradients in e5m2 (hybrid); default: none does",
        also="fp8_format float8",
    )
    fp8_recipe: str = key(
        next(iter(RECIPES)),
        "blocks that share a scale: 1x128 and 128x128, whole tensors, rows, or 1x32 with one byte per scale",
        choices=RECIPES,
        also="quantize.linear.float8.recipe_name float8_recipe_name",
    )
    num_layers_at_start_in_bf16: int = key(0, "with fp8: first layers whose linears stay in precision", ge=0)
    num_layers_at_end_in_bf16: int = key(
        0, "with fp8: last layers whose linears stay in precision", ge=0, also="first_last_layers_bf16"
    )
    fp8_exclude: Annotated[tuple[str, ...], Field(strict=False, examples=['["*.attention.proj"]'])] = key(
        (),
        "with fp8: patterns of linears that stay in precision, such as *.attention.proj",
        also="filter_fqns quantize.linear.float8.filter_fqns",
    )
    fp8_param_gather: bool = key(
        False,
        "with fp8: weights are quantized once per step, and all-gathered and kept as fp8; blockwise and tensorwise",
        also="fp8_param enable_fsdp_float8_all_gather fp8_all_gather",
    )
    loss_scale: float | None = key(None, "fixed loss scale, with fp16; default: dynamic", gt=0, most=2**64)
    initial_loss_scale: float = key(2.0**32, "initial value of a dynamic loss scale", gt=0, most=2**64)
    min_loss_scale: float = key(1.0, gt=0, most=2**64)
    loss_scale_window: int = key(1000, "consecutive finite steps after which the loss scale doubles", ge=1)
    hysteresis: int = key(2, "non-finite steps before the loss scale halves", ge=1)
    eval_interval: int | None = key(None, "default: never", ge=1, also="eval_steps")
    eval_iters: int = key(10, ge=1, most=10**6)
    eval_ema_weights: bool = key(
        True, "with optimizer.ema_decay: evaluate the averaged weights as well", also="evaluate_ema_weights_instead"
    )
    loss_chunk_tokens: int | None = key(
        None, "tokens per chunk of the loss: only one chunk has logits in memory; default on CPUs: 1024", ge=1
    )
    loss_chunk_mb: float | None = key(
        None, "instead: MiB of fp32 logits per chunk on each rank; default on GPUs: 1024", gt=0
    )
    bucket_mb: float | None = key(
        None,
        "bucket size of gradient reduction over data-parallel ranks, in MiB; default: on CPUs 25, on GPUs the "
        "larger of 160 and 4 per data-parallel rank",
        gt=0,
        most=10**6,
        also="ddp_bucket_size bucket_cap_mb reduce_bucket_size",
    )
    recompute_granularity: Literal["selective", "full"] | None = key(
        None,
        "activation recomputation (checkpointing): modules of each layer, or full layers; default: none",
        also="activation_checkpoint.mode gradient_checkpointing recompute_activations",
    )
    recompute_modules: RecomputeModules | None = key(
        None,
        "modules to recompute, with selective; mlp_act includes moe_act; moe is a whole mixture of experts, "
        "mlp a whole dense MLP, layernorm the norms before attention and MLP, without compile; "
        "mla_up_proj goes with core_attn; default: core_attn",
        strict=False,
        min_length=1,
    )
    recompute_method: Literal["uniform", "block"] | None = key(
        None, "with full: all layers in groups, or the first layers of each stage; default: uniform"
    )
    recompute_num_layers: int | None = key(
        None, "with full: layers per group (uniform) or per stage (block); default: 1", ge=1
    )
    manual_gc: bool = key(
        False, "collect Python's garbage only every manual_gc_interval iterations, on all ranks at once"
    )
    manual_gc_interval: int = key(0, "with manual_gc; 0: never during training", ge=0)
    deterministic_mode: bool = key(
        False, "kernels that give the same bits in every run; an operation without one is an error"
    )
    cpu_offloading: bool = key(False, "keep saved activations in CPU memory until backward; GPUs only")
    grad_reduce_in_bf16: bool = key(False, "communicate gradients in bf16; they are still accumulated in fp32")
    tp_grad_reduce_in_bf16: bool = key(
        False, "with bf16: reduce weight gradients over tensor axes in bf16, half the bytes of fp32"
    )
    norm_implementation: Literal["torch", "apex"] = key(
        "torch", "fused LayerNorm and RMSNorm where features are not sharded: PyTorch's, or NVIDIA apex's"
    )
    compile: bool | Literal["auto"] = key(
        "auto",
        "torch.compile each layer; auto: on GPUs, not on CPUs; what does not compile is an error",
        also="compile.enable torch_compile",
    )


class GroupOptions(Section, frozen=True):
    """How some parameters are updated otherwise than the rest; what is open stays as without the group."""

    params: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = key(...)
    lr_mult: float = key(1.0, gt=0)
    wd_mult: float | None = key(None, ge=0)
    optimizer: Literal["adam"] | None = key(None)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the names of parameters."""
        return (self.params,) if isinstance(self.params, str) else self.params

    def names(self, names: Sequence[str]) -> bool:
        """Return whether a pattern fits one of these names of tensors."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns for name in names)


ParamGroups = Annotated[
    tuple[GroupOptions, ...], Field(strict=False, examples=["[{params: embedding.*, lr_mult: 0.1, wd_mult: 0}]"])
]


class OptimizerConfig(Section, frozen=True):
    """Update rule of the weights and its learning-rate schedule."""

    lr: float = key(3e-4, gt=0, also="learning_rate")
    min_lr: float = key(0.0, ge=0, also="lr_min min_learning_rate")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "cosine", also="lr_scheduler_type schedule lr_schedule decay_lr decay_type"
    )
    lr_warmup_init: float = key(0.0, "learning rate that the warm-up begins with", ge=0)
    lr_warmup_iters: int = key(0, ge=0, also="warmup_iters warmup_steps lr_warmup_steps warmup")
    lr_warmup_samples: int = key(0, "with train_samples, instead of lr_warmup_iters", ge=0)
    lr_warmup_fraction: float | None = key(
        None,
        "instead of lr_warmup_iters or lr_warmup_samples: fraction of lr_decay_iters, or of lr_decay_samples",
        ge=0,
        lt=1,
        also="warmup_ratio",
    )
    lr_decay_iters: int | None = key(None, "default: train_iters", ge=1, also="decay_iters lr_decay_steps")
    lr_decay_samples: int | None = key(
        None, "with train_samples, instead of lr_decay_iters; default: train_samples", ge=1
    )
    lr_wsd_decay_iters: int | None = key(
        None, "iterations of the WSD decay phase; default: a tenth of lr_decay_iters", ge=1
    )
    lr_wsd_decay_samples: int | None = key(
        None, "with train_samples, instead of lr_wsd_decay_iters; default: a tenth of lr_decay_samples", ge=1
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "linear", "shape of the WSD decay phase"
    )
    optimizer: Literal["adam", "lion", "muon", "soap"] = key(
        "adam", "update rule: AdamW; Lion; or Muon or SOAP for the matrices of layers, and AdamW for all else"
    )
    weight_decay: float = key(0.1, "of a step: learning rate x weight_decay x weights", ge=0)
    start_weight_decay: float | None = key(
        None, "instead of weight_decay, with weight_decay_incr_style: at the begin of the run", ge=0
    )
    end_weight_decay: float | None = key(
        None, "instead of weight_decay, with weight_decay_incr_style: at the end of the run", ge=0
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key(
        "constant", "growth of the weight decay over the run"
    )
    independent_weight_decay: bool = key(
        False, "weight decay of a step independent of lr: weight_decay x the schedule's fraction of lr x weights"
    )
    param_groups: ParamGroups = key(
        (),
        "parameters that are updated otherwise, the first group whose patterns name one: factors of learning rate and "
        "weight decay, and AdamW in place of the rule",
        also="group_overrides decoupled_lr",
    )
    adam_beta1: float = key(0.9, ge=0, lt=1, also="beta1")
    adam_beta2: float = key(0.95, ge=0, lt=1, also="beta2")
    adam_eps: float = key(1e-8, gt=0, also="eps epsilon adam_epsilon")
    clip_grad: float = key(
        1.0,
        "maximum global gradient norm; 0: no clipping",
        ge=0,
        also="grad_clip max_norm max_grad_norm gradient_clipping",
    )
    exp_avg_dtype: MomentDtype | None = key(None, "dtype of the first moment; default: that of the master weights")
    exp_avg_sq_dtype: MomentDtype | None = key(None, "dtype of the second moment; default: that of the master weights")
    ema_decay: float | None = key(
        None,
        "keep an exponential moving average of the weights with this decay; default: none",
        gt=0,
        lt=1,
        also="ema ema_beta ema_rate model_ema model_ema_decay",
    )
    adam_implementation: Literal["torch", "apex"] = key(
        "torch", "fused kernel: PyTorch's, or NVIDIA apex's (built from source, not the PyPI package of that name)"
    )

    lion_beta1: float = key(0.95, "weight of the momentum in an update", ge=0, lt=1)
    lion_beta2: float = key(0.98, "decay of the momentum", ge=0, lt=1)
    lion_eps: float = key(
        1e-8, "below it an update shrinks in proportion: the sign of rounding would differ between layouts", gt=0
    )
    muon_momentum: float = key(0.95, ge=0, lt=1)
    muon_use_nesterov: bool = key(True, "orthogonalize an interpolation of gradient and momentum")
    muon_num_ns_steps: int = key(5, "Newton-Schulz iterations of an update", ge=1, also="ns_steps muon_ns_steps")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = key(
        "spectral",
        "factor of an update of a matrix of m outputs and n inputs: sqrt(max(m, n)), sqrt(m/n), or sqrt(max(1, m/n))",
    )
    muon_extra_scale_factor: float = key(
        0.2, "further factor of an update; 0.2 with spectral gives it the size of AdamW's, for the same lr", gt=0
    )
    qk_clip: bool = key(
        False, "after an update, scale queries and keys of heads whose largest logit is above qk_clip_threshold"
    )
    qk_clip_threshold: float = key(100.0, gt=0, also="qk_clip_tau")
    qk_clip_alpha: float = key(0.5, "exponent of the factor of queries; keys have the rest", ge=0, le=1)
    muon_max_home_elements: int = key(
        2**28,
        "larger matrices are divided among all ranks of a pipeline stage, which sum Gram matrices in each iteration",
        ge=1,
    )
    muon_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "dtype in which matrices are sent and orthogonalized; fp64 runs use fp64"
    )
    soap_precondition_frequency: int = key(
        10, "steps from one refresh of the eigenbases to the next", ge=1, also="precondition_frequency"
    )
    soap_shampoo_beta: float | None = key(
        None, "decay of the Grams whose eigenbases they are; default: adam_beta2", ge=0, lt=1, also="shampoo_beta"
    )
    soap_max_precond_dim: int = key(
        10_000, "a larger dim of a matrix is not rotated", ge=1, also="max_precond_dim max_preconditioner_dim"
    )
    soap_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "dtype in which matrices are sent; state and products have that of the master weights"
    )

    @property
    def needs_matrices(self) -> bool:
        """Whether updates compute on whole matrices, which ranks exchange."""
        return self.optimizer in ("muon", "soap")

    @field_validator("clip_grad")
    @classmethod
    def _clips_in_fp32(cls, value: float) -> float:
        """Return the value; raises ValueError for one that fp32, in which gradients are scaled, rounds to 0."""
        if 0 < value < (least := 1.2e-38):
            raise Refused(f"less than {least}, which fp32 rounds to 0; use 0, or {least} or more")
        return value


class Config(Section, frozen=True):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
