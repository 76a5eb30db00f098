"""What the planner plans for, and the full prediction of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron3d.config.read import nearest, one_of, read_values
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import ITEMSIZES, Config
from megatron3d.config.yaml_origins import parse_value
from megatron3d.errors import UserError
from megatron3d.forecast.memory.rank import RankMemory, fitting_rank_memory, largest_rank_memory, library_bytes
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.search.options import LayoutChoice, LayoutFields
from megatron3d.forecast.time.breakdown import TimePrediction
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.practices import OURS, ExecutionProfile, divided_as
from megatron3d.forecast.time.step import as_configured, load_machine, predict_time, simulated_specs
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.runtime.arguments import shorten

# Values of a layout by the keys of a configuration.
VALUES: Mapping[str, Callable[[LayoutChoice], object]] = {
    "parallel.tensor_parallel_mode": lambda layout: layout.tensor.mode,
    "parallel.tensor_model_parallel_size": lambda layout: layout.tensor.size,
    "parallel.context_parallel_size": lambda layout: layout.context.size,
    "parallel.cp_comm_type": lambda layout: layout.context.exchange,
    "parallel.expert_model_parallel_size": lambda layout: layout.experts.size,
    "parallel.expert_tensor_parallel_size": lambda layout: layout.experts.split,
    "parallel.pipeline_model_parallel_size": lambda layout: layout.pipeline,
    "parallel.pipeline_schedule": lambda layout: layout.schedule,
    "parallel.virtual_pipeline_model_parallel_size": lambda layout: layout.virtual,
    "parallel.zero_stage": lambda layout: layout.zero_stage,
    "train.micro_batch_size": lambda layout: layout.micro_batch_size,
    "train.recompute_granularity": lambda layout: layout.recompute,
}


@dataclass(frozen=True)
class FixedKeys:
    """Values that layouts must have, by key."""

    values: tuple[tuple[str, object], ...] = ()

    def allow(self, fields: LayoutFields) -> bool:
        """Return whether a layout of these fields has all values."""
        if not self.values:
            return True
        layout = LayoutChoice(*fields)
        return all(VALUES[key](layout) == value for key, value in self.values)


NOTHING = FixedKeys()


def read_fixed(texts: Sequence[str]) -> FixedKeys:
    """Return the values of texts such as `tensor_model_parallel_size=4`.

    Raises UserError with every problem: a key that is not the planner's or is given twice, a value that it cannot have.
    """
    names = {name: key for key in VALUES for name in (key, key.partition(".")[2])}
    values, problems = dict[str, object](), list[str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            use = nearest(name, names) or one_of(key.partition(".")[2] for key in VALUES)
            problems.append(f"--fix {shorten(text)}: not a key that the planner chooses; use {use}=VALUE")
            continue
        if names[name] in values:
            problems.append(f"--fix {shorten(text)}: given twice; give each key once")
            continue
        try:
            values[names[name]] = parse_value(value)
        except (ValueError, RecursionError) as error:
            problems.append(f"--fix {shorten(text)}: the value is not YAML ({error})")
    UserError.collect(problems)
    read_values(values, "--fix")
    return FixedKeys(tuple(values.items()))


# Part of memory that is left to the allocator, where what it reserves is not predicted.
SPARE = 0.08


@dataclass(frozen=True)
class PredictedLayout:
    """A layout with its step time, the memory of the rank that needs most, and what its libraries hold next to it."""

    layout: LayoutChoice
    config: Config
    step: TimePrediction
    memory: RankMemory
    library_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory of the rank that needs most."""
        return self.memory.total + self.library_bytes


@dataclass(frozen=True)
class PlanningProblem:
    """Model and global batch to plan for, the number of ranks, and the cluster.

    Attributes:
        profile: execution profile of the framework that trains.
        fixed: values that layouts must have.
        spare: fraction of memory that is left to the allocator and to errors of the prediction; None: `SPARE`, and
            nothing for a framework whose allocator's own part is predicted by fitted terms.
    """

    config: Config
    vocab_size: int
    cluster: str
    num_ranks: int
    profile: ExecutionProfile = OURS
    fixed: FixedKeys = NOTHING
    spare: float | None = None

    @cached_property
    def machine(self) -> Machine:
        """The machine that the run is planned for, with its kernels."""
        machine = load_machine(self.cluster, self.config.train.precision, self.num_ranks, self.profile)
        return as_configured(machine, self.spec(self.config))

    @property
    def memory_bytes(self) -> float:
        """Bytes of a rank that tensors and libraries may use."""
        is_reserved = self.profile.fitted.activation_memory > 1
        spare = (0.0 if is_reserved else SPARE) if self.spare is None else self.spare
        return self.machine.device.kernels.memory_gib * 2**30 * (1 - spare)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the network's dtype."""
        return ITEMSIZES[self.config.train.precision]

    def spec(self, config: Config) -> RunSpec:
        """Return the run of a configuration on these ranks with this vocabulary."""
        model = config.model.model_copy(update={"vocab_size": self.vocab_size})
        return divided_as(RunSpec(config.model_copy(update={"model": model}), self.num_ranks), self.profile)

    def plan(self, layout: LayoutChoice) -> PredictedLayout:
        """Predict a layout in full."""
        return self.predicted(layout, layout.apply_to(self.config))

    def predicted(self, layout: LayoutChoice, config: Config) -> PredictedLayout:
        """Predict a configuration in full."""
        spec = self.spec(config)
        return PredictedLayout(layout, config, self.step(spec), self.memory(spec), self.library_bytes(spec))

    def step(self, spec: RunSpec) -> TimePrediction:
        """Predict the time of a step."""
        return predict_time(spec, self.machine)

    def memory(self, spec: RunSpec) -> RankMemory:
        """Predict the memory of the rank that needs most."""
        simulated, _ = simulated_specs(spec)
        most = self.memory_bytes - self.library_bytes(spec)
        return largest_rank_memory(make_step_spec(simulated, self.machine.kernels_of(spec)), self.profile, most)

    def fitting_memory(self, spec: RunSpec) -> RankMemory | None:
        """Predict the memory of the rank that needs most; None if a rank needs more than its libraries leave."""
        simulated, _ = simulated_specs(spec)
        most = self.memory_bytes - self.library_bytes(spec)
        return fitting_rank_memory(make_step_spec(simulated, self.machine.kernels_of(spec)), most, self.profile)

    def library_bytes(self, spec: RunSpec) -> int:
        """Predict what libraries hold outside torch's allocator, on the pipeline rank with most links."""
        ranks = spec.mesh.ranks((PIPELINE,))
        states = (spec.parallel_state.on_rank(rank) for rank in dict.fromkeys((*ranks[:2], *ranks[-2:])))
        return max(library_bytes(state, self.machine.device.kernels) for state in states)

    def tokens_per_s(self, plan: PredictedLayout) -> float:
        """Return the tokens per second of all ranks."""
        return self.config.train.global_batch_size * self.config.model.seq_length / plan.step.step_s

    def mfu(self, plan: PredictedLayout) -> float:
        """Return model FLOPs over the peak of all ranks."""
        flops = flops_per_token(self.spec(self.config).arch) * self.tokens_per_s(plan)
        return flops / (self.num_ranks * self.machine.device.peak)
