"""Values derived from a configuration on a given number of ranks, each derived once.

    config, world size, tokenizer  ->  RunSpec  ->  training
                                                ->  dry run            (verify/dry_run)
                                                ->  time prediction    (forecast/time)
                                                ->  memory prediction  (forecast/memory)

All four read the properties of one `RunSpec`, so that none can differ in what it derives.  Every property is computed
when it is first read: the rules in config/validate/ read those that are defined for a configuration that breaks others.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron3d.attention.context.plan import with_context
from megatron3d.config.model_defaults import resolve_architecture, token_dispatcher
from megatron3d.config.schema import DEFAULT_ITERS, Config
from megatron3d.data.corpus.plan import CorpusSpec
from megatron3d.data.ramp_plan import Batches, make_ramp
from megatron3d.errors import UserError
from megatron3d.experts.plan import stage_axes, with_experts
from megatron3d.linear.fp8_plan import Fp8, largest_value_axes
from megatron3d.linear.overlap_plan import TPOverlap
from megatron3d.model.group_plan import communication_axes, exposed_axes, pipeline_links
from megatron3d.model.spec import CORE_ATTN, LAYERNORM, UNIFORM, Architecture, Recompute
from megatron3d.model.stage_plan import divide, make_stages
from megatron3d.ops.plan import CPU_LOSS_CHUNK, GPU_LOSS_CHUNK, LossChunk
from megatron3d.parallel.home_plan import home_axes
from megatron3d.parallel.layout import Sharding, bucket_bytes
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode
from megatron3d.parallel.parallel_state import ParallelSizes, ParallelState
from megatron3d.pipeline.actions import Costs, Schedule, stage_to_rank
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, Pipeline, build_schedule, layer_flops, load_schedule

if TYPE_CHECKING:
    from megatron3d.data.packing import Packing


@dataclass(frozen=True)
class LRPhases:
    """Lengths of the phases of the learning-rate schedule, in iterations, or in samples where the run has samples.

    Attributes:
        counts_samples: the unit.
        warmup: of the linear warm-up; end: of warm-up and decay together; wsd_decay: of the last phase of WSD.
        length: of the whole run.
    """

    counts_samples: bool
    warmup: float
    end: int
    wsd_decay: int
    length: int

    def position(self, iteration: int, consumed_samples: int) -> int:
        """Return the place in the schedule of an iteration, counted from 1, after which the samples are consumed."""
        return consumed_samples if self.counts_samples else iteration


@dataclass(frozen=True)
class RunSpec:
    """A configuration on `world_size` ranks, seen from one of them.

    Attributes:
        config: the configuration as read; world_size: number of ranks.
        vocab_size: tokens of the tokenizer, used where `model.vocab_size` is open; 0: not known yet.
        rank: global rank of this process; documents: where further documents begin in typical sequences of the corpus.
    """

    config: Config
    world_size: int = 1
    vocab_size: int = 0
    rank: int = 0
    documents: tuple[tuple[int, ...], ...] | None = None

    def on_rank(self, rank: int) -> RunSpec:
        """Return the same run seen from another rank."""
        return replace(self, rank=rank)

    def with_config(self, config: Config) -> RunSpec:
        """Return the run of another configuration on the same ranks, with the same tokenizer."""
        return replace(self, config=config)

    def with_microbatches(self, count: int) -> RunSpec:
        """Return a run whose global batch has `count` microbatches."""
        size = count * self.config.train.micro_batch_size * self.sizes.data
        train = self.config.train.model_copy(update={"global_batch_size": size})
        return self.with_config(self.config.model_copy(update={"train": train}))

    # Model

    @cached_property
    def arch(self) -> Architecture:
        """Architecture with every default resolved; the vocabulary is padded so that every split of it is even."""
        return resolve_architecture(
            self.config.model, self.config.model.vocab_size or self.vocab_size, self.mode.vocab_multiple
        )

    @cached_property
    def recompute(self) -> Recompute:
        """Layers and modules with activation recomputation."""
        train = self.config.train
        return Recompute(
            train.recompute_granularity or "none",
            frozenset(train.recompute_modules or (CORE_ATTN,)),
            train.recompute_method or UNIFORM,
            train.recompute_num_layers or 1,
            train.cpu_offloading,
        )

    @cached_property
    def fp8(self) -> Fp8 | None:
        """Fp8 of the linears of layers; None: they multiply in the network's dtype."""
        train, last = self.config.train, self.arch.num_layers
        if train.fp8 is None:
            return None
        wide = {*range(train.num_layers_at_start_in_bf16), *range(last - train.num_layers_at_end_in_bf16, last)}
        return Fp8(train.fp8_recipe, train.fp8, frozenset(wide), train.fp8_exclude, train.fp8_param_gather)

    def loss_chunk(self, on_gpu: bool) -> LossChunk:
        """Return the largest chunk of the loss."""
        train = self.config.train
        if train.loss_chunk_tokens is not None:
            return LossChunk(train.loss_chunk_tokens)
        if train.loss_chunk_mb is not None:
            return LossChunk(num_bytes=train.loss_chunk_mb * 2**20)
        return GPU_LOSS_CHUNK if on_gpu else CPU_LOSS_CHUNK

    def compiles(self, on_gpu: bool) -> bool:
        """Return whether layers are compiled: as configured, by default on GPUs.

        By default not where norms are recomputed, logits of attention recorded, or elements in fp8 counted.
        """
        setting = self.config.train.compile
        counts_fp8 = self.fp8 is not None and self.config.logging.fp8_stats_interval is not None
        fits = LAYERNORM not in self.recompute.chosen and not self.config.optimizer.qk_clip and not counts_fp8
        return on_gpu and fits if setting == "auto" else setting

    # Tensor parallelism

    @cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """Sizes of the tensor axes."""
        parallel = self.config.parallel
        if parallel.tensor_parallel_shape is not None:
            return parallel.tensor_parallel_shape
        return MODES[parallel.tensor_parallel_mode].default_shape(parallel.tensor_model_parallel_size or 1)

    @property
    def tensor_size(self) -> int:
        """TP: the product of the tensor axes."""
        return math.prod(self.tensor_shape)

    @cached_property
    def tensor_mode(self) -> Mode:
        """The tensor-parallel mode with the sizes of its axes."""
        parallel = self.config.parallel
        form = "sequence_parallel" if parallel.sequence_parallel else parallel.tensor_parallel_form
        return build_mode(parallel.tensor_parallel_mode, form, self.tensor_shape)

    @cached_property
    def mode(self) -> Mode:
        """The tensor-parallel mode, with context, the axes of experts, and their dispatcher."""
        parallel = self.config.parallel
        exchange, balancer = parallel.cp_comm_type, parallel.context_parallel_load_balancer
        mode = with_context(self.tensor_mode, parallel.context_axes, exchange, balancer)
        ranks = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
        mode = with_experts(mode, *ranks, stage_axes(mode, self.sizes.shards, self.sizes.replicas))
        return replace(mode, dispatcher=token_dispatcher(self.config))

    @cached_property
    def overlap(self) -> TPOverlap:
        """Overlaps of the communication of matmuls with their GEMMs."""
        parallel = self.config.parallel
        return TPOverlap(
            parallel.tp_comm_overlap_input_grad,
            parallel.tp_comm_overlap_weight_grad,
            parallel.tp_comm_overlap_weight_gather,
            parallel.tp_keep_gathered_weights,
            parallel.tp_comm_overlap,
        )

    @property
    def narrow_wgrad(self) -> bool:
        """Whether weight gradients are reduced over tensor axes in bf16."""
        return self.config.train.tp_grad_reduce_in_bf16 and self.tensor_size > 1

    # Ranks

    @cached_property
    def sizes(self) -> ParallelSizes:
        """Factors of the world size: TP, CP, PP, and DP, which takes the remaining ranks."""
        parallel = self.config.parallel
        pipeline, replicas = parallel.pipeline_model_parallel_size, parallel.num_distributed_optimizer_instances
        return ParallelSizes(self.world_size, self.tensor_size, pipeline, replicas, parallel.context_parallel_size)

    @cached_property
    def mesh(self) -> Mesh:
        """The grid of all ranks, seen from this one.  Raises UserError where the sizes do not make the world size."""
        return self.sizes.mesh(self.mode.axes, self.rank, self.mode.pieces)

    @cached_property
    def parallel_state(self) -> ParallelState:
        """The place of this rank among all ranks: its groups, links, ranks and sizes."""
        axes, links = communication_axes(self.arch, self.mode, self.mesh), pipeline_links(self.arch, self.pipeline)
        if self.config.optimizer.needs_matrices and (homes := home_axes(self.mesh)):
            axes = tuple(dict.fromkeys((*axes, homes)))
        if self.fp8 is not None:
            plans = {plan.on(self.mesh) for plan in (self.mode.expand, self.mode.contract, self.mode.latent)}
            found = [largest_value_axes(self.fp8.recipe, plan, self.mesh) for plan in plans]
            axes = tuple(dict.fromkeys((*axes, *sorted(itertools.chain.from_iterable(found)))))
        return ParallelState(self.mesh, axes, links)

    @cached_property
    def exposed_axes(self) -> tuple[Axes, ...]:
        """Sets of mesh axes whose collectives overlap with no computation, of those that the run communicates over."""
        return exposed_axes(self.arch, self.mode, self.mesh, self.overlap)

    @cached_property
    def sharding(self) -> Sharding:
        """Sharding of training state by ZeRO over the data axis and the context axes."""
        return Sharding.of_stage(self.config.parallel.zero_stage, self.mesh.zero)

    def bucket_bytes(self, on_gpu: bool) -> float:
        """Return the least bytes of gradients that are reduced together, on GPUs or on CPUs."""
        return bucket_bytes(self.config.train.bucket_mb, self.sizes.data, on_gpu)

    # Batches

    @cached_property
    def batches(self) -> Batches:
        """The global batch of every iteration, ramp-up of its size and its length included."""
        train = self.config.train
        return Batches(
            make_ramp(train.rampup_batch_size, train.global_batch_size),
            make_ramp(train.seq_length_warmup, self.config.model.seq_length),
        )

    @cached_property
    def train_iters(self) -> int:
        """Iterations of the run: as configured, or those of its samples."""
        train = self.config.train
        if train.train_samples is not None:
            return self.batches.num_iterations(train.train_samples)
        return train.train_iters or DEFAULT_ITERS

    @cached_property
    def lr_phases(self) -> LRPhases:
        """Phases of the learning-rate schedule."""
        ours, samples = self.config.optimizer, self.config.train.train_samples
        if samples is None:
            warmup, phase = ours.lr_warmup_iters, ours.lr_wsd_decay_iters
            end = ours.lr_decay_iters or self.train_iters
        else:
            warmup, phase = ours.lr_warmup_samples, ours.lr_wsd_decay_samples
            end = ours.lr_decay_samples or samples
        length = warmup if ours.lr_warmup_fraction is None else ours.lr_warmup_fraction * end
        whole = self.train_iters if samples is None else samples
        return LRPhases(samples is not None, length, end, phase or max(end // 10, 1), whole)

    @cached_property
    def corpus(self) -> CorpusSpec:
        """The corpora that the run reads."""
        data, train = self.config.data, self.config.train
        return CorpusSpec(
            data_path=data.data_path,
            train_data_path=data.train_data_path,
            valid_data_path=data.valid_data_path,
            test_data_path=data.test_data_path,
            split=data.split,
            seq_length=self.config.model.seq_length,
            seed=train.seed,
            vocab_size=self.config.model.vocab_size,
            validates=train.eval_interval is not None,
            tokenizer_type=data.tokenizer_type,
            tokenizer_model=data.tokenizer_model,
            add_bos_token=data.add_bos_token,
            stream_key=data.stream_key,
            stream_lanes=data.stream_lanes,
            stream_shuffle_rows=data.stream_shuffle_rows,
            skips_bad_records=data.on_bad_record == "skip",
        )

    def packing(self, eod: int | None) -> Packing:
        """Return the packing of documents into samples; `eod` is the tokenizer's token that ends a document.

        Raises UserError where the options need that token and the tokenizer has none, or name a token that it lacks.
        """
        from megatron3d.data.packing import Packing  # it imports torch, which --check does not need

        data, vocab_size = self.config.data, max(self.config.model.vocab_size or 0, self.vocab_size)
        if data.pad_token_id is not None and 0 < vocab_size <= data.pad_token_id:
            raise UserError(
                f"data.pad_token_id={data.pad_token_id}: outside the vocabulary of {vocab_size} tokens, so that "
                f"nothing would be left out of the loss; use 0 to {vocab_size - 1}, or null"
            )
        packing = Packing(
            eod,
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
            data.pad_token_id,
            None if data.goldfish_k is None else (data.goldfish_k, data.goldfish_h),
        )
        if packing.reason and eod is None:
            raise UserError(
                f"{packing.reason}=true: data.tokenizer_type={data.tokenizer_type} has no token that ends a document; "
                "use a tokenizer with one, or false"
            )
        return packing

    @property
    def packing_identity(self) -> str | None:
        """The options of packing that change the meaning of a sample; None if all have their defaults."""
        data, defaults = self.config.data, type(self.config.data)()
        goldfish = () if data.goldfish_k is None else ("goldfish_k", "goldfish_h")
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "pad_token_id", *goldfish)
        values = {name: getattr(data, name) for name in names}
        return ", ".join(f"{key}={value}" for key, value in values.items() if value != getattr(defaults, key)) or None

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step at full batch size, empty ones included: global batch / (microbatch x DP)."""
        return -(-self.config.train.global_batch_size // (self.config.train.micro_batch_size * self.sizes.data))

    # Pipeline

    @property
    def num_virtual_stages(self) -> int:
        """Stages per pipeline rank of a schedule that has a name."""
        given = self.config.parallel.virtual_pipeline_model_parallel_size
        return SCHEDULES[self.config.parallel.pipeline_schedule].min_virtual if given is None else given

    @property
    def has_schedule_file(self) -> bool:
        """Whether the schedule is read from a file instead of generated by its name."""
        return self.config.parallel.pipeline_schedule == FROM_FILE

    @property
    def schedule_file(self) -> Path:
        """Path of the schedule file of a run that has one."""
        path = self.config.parallel.pipeline_schedule_file
        assert path is not None, "parallel.pipeline_schedule=file comes with pipeline_schedule_file"
        return Path(path)

    @property
    def stage_owners(self) -> tuple[int, ...]:
        """The pipeline rank of each stage.  Raises UserError where the schedule's file cannot be read."""
        if self.has_schedule_file:
            return tuple(stage_to_rank(load_schedule(self.schedule_file)).values())
        place = SCHEDULES[self.config.parallel.pipeline_schedule].rank_of_stage
        ranks = self.config.parallel.pipeline_model_parallel_size
        return tuple(place(stage, ranks) for stage in range(ranks * self.num_virtual_stages))

    @cached_property
    def schedule(self) -> Schedule:
        """The computations of every pipeline rank.  Raises UserError where the schedule's file cannot be used."""
        ranks = self.sizes.pipeline
        if self.has_schedule_file:
            return load_schedule(self.schedule_file, ranks, self.num_microbatches)
        costs = Costs(**{kind.value: float(count) for kind, count in layer_flops(self.arch).items()})
        name = self.config.parallel.pipeline_schedule
        return build_schedule(name, ranks, self.num_microbatches, self.num_virtual_stages, costs)

    @cached_property
    def pipeline(self) -> Pipeline:
        """Stages, schedule and owners.  Raises UserError where the schedule's file cannot be used."""
        where = tuple(stage_to_rank(self.schedule).values())
        counts = self.config.parallel.pipeline_model_parallel_layout or divide(self.arch, len(where), where)
        return Pipeline(make_stages(counts), where, self.schedule)
