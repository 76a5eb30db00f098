"""Accelerators and clusters, from the YAML files of `hardware/`, and the times of their kernels and collectives.

    GEMM                 max(waves (K + ramp) tile / (share of the peak of a unit), bytes / bandwidth)
    other kernels        bytes / bandwidth
    ring over n ranks    steps alpha + sent bytes / min over crossed levels of (members per unit below x link per rank)

A GEMM runs as waves of tiles over the multiprocessors, of the best size, as a library would choose it (Williams,
Waterman and Patterson 2009 for the roofline; "Matrix Multiplication Background User's Guide" of NVIDIA for tiles and
waves).

A cluster has a bandwidth per rank at each level, such as socket, node, network.  Concurrent groups share a node's
links; a group with several members in a node leaves it by the links of all of them (Thakur, Rabenseifner and Gropp
2005; NCCL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron3d.config.yaml_origins import read_yaml
from megatron3d.errors import UserError
from megatron3d.forecast.time.practices import NEUTRAL, FittedTerms
from megatron3d.forecast.time.tasks import GemmKind
from megatron3d.linear.fp8_plan import has_kernel
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.runtime.arguments import MAX_NUMBER, MAX_RANKS, shorten

FOLDER = Path(__file__).parents[2] / "hardware"
CLUSTERS = FOLDER / "clusters"
# Name of fp8 among the peaks of an accelerator.
FP8 = "fp8"
# Bytes of a row that Tensor Cores load at a time (cuBLAS, "Tensor Core Usage").
LOAD_BYTES = 16

Above0 = Annotated[float, Field(ge=1e-9, le=MAX_NUMBER)]
AtLeast0 = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Share = Annotated[float, Field(ge=1e-9, le=1)]


class HardwareFile(BaseModel):
    """Base of the models of YAML files: no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class KernelRates(HardwareFile):
    """Rates that an accelerator's kernels reach.

    Attributes:
        memory_gib: device memory of a process: `context_gib` for its context, `communicator_gib` for each communicator,
            and the rest for tensors.
        stream_gb_s: memory bandwidth by data sheet; long memory-bound kernels reach `stream_fraction` of it.
        matmul_fraction: fraction of the peak that the best large GEMM sustains; `fp8_fraction`: of fp8's, if another.
        tile_fractions: fraction of that by the output tile of a multiprocessor; smaller tiles read more per FLOP.
        num_units: number of multiprocessors; each computes one tile at a time.
        ramp_k: ramp-up and drain of a tile, as additional length of K.
        attention_fractions: fractions of the peak that fused causal attention reaches, forward and backward.
        launch_us: least time between the starts of two kernels.
        adds_launch: the launch time adds to each kernel's time (CPU); otherwise a longer kernel hides it (GPU).
        comm_units: multiprocessors that a collective takes from the computation that it overlaps with.
    """

    memory_gib: Above0
    context_gib: AtLeast0 = 0
    communicator_gib: AtLeast0 = 0
    stream_gb_s: Above0
    stream_fraction: Share
    matmul_fraction: Share
    fp8_fraction: Share | None = None
    tile_fractions: Mapping[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$")], Share] = Field(
        min_length=1
    )
    num_units: Ranks
    ramp_k: AtLeast0
    attention_fractions: tuple[Share, Share]
    launch_us: AtLeast0
    adds_launch: bool = False
    comm_units: int = Field(default=0, ge=0, le=MAX_RANKS)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that long memory-bound kernels reach."""
        return self.stream_gb_s * 1e9 * self.stream_fraction

    @cached_property
    def tiles(self) -> tuple[tuple[int, int, float], ...]:
        """Rows, columns and fraction of the peak of each tile."""
        split = ((name.partition("x"), fraction) for name, fraction in self.tile_fractions.items())
        return tuple((int(rows), int(columns), fraction) for (rows, _, columns), fraction in split)


class MeasuredRates(HardwareFile):
    """Rates of `KernelRates` that today's kernels reach, as `benchmarks/gpu_day.py` measures them."""

    stream_fraction: Share
    matmul_fraction: Share
    fp8_fraction: Share | None = None
    attention_fractions: tuple[Share, Share]


class Accelerator(HardwareFile):
    """An accelerator; without `kernels` only its peak is known.

    Attributes:
        capability: compute capability of an NVIDIA GPU, by which its kernels of fp8 operands are known.
        kernels: rates of the published runs that validate the cost model, or of a calibration.
        measured: rates that differ from them with today's kernels.
    """

    device_names: str
    peak_tflops: Mapping[str, Above0]
    capability: tuple[int, int] | None = None
    source: str
    kernels: KernelRates | None = None
    measured: MeasuredRates | None = None

    @property
    def today(self) -> Accelerator:
        """This accelerator with the rates of today's kernels, where they are measured."""
        if self.kernels is None or self.measured is None:
            return self
        return self.model_copy(update={"kernels": self.kernels.model_copy(update=dict(self.measured))})


class NetworkLevel(HardwareFile):
    """One level of a cluster: ranks with the same kind of link.

    Attributes:
        ranks: ranks of one unit of this level, the units below included.
        gb_s: bandwidth with which each rank can send out of its unit of the level below, while all others do, too.
        is_pairwise: each two ranks have their own link of `gb_s`, so that rings over more ranks are faster.
        latency_us: latency of one step of a collective.
    """

    name: str
    ranks: Ranks
    gb_s: Above0
    is_pairwise: bool = False
    latency_us: AtLeast0


class SlurmDefaults(HardwareFile):
    """Options of sbatch (null: without a value), and shell lines to run before the launch."""

    options: Mapping[str, str | int | None] = {}
    setup: tuple[str, ...] = ()


class Cluster(HardwareFile):
    """Accelerators and the network levels that connect them, the innermost first.

    Attributes:
        call_us: time of every collective in addition to its steps: its launch, and waiting for late ranks.
        is_degraded: collectives measure less bandwidth than those of the same nodes in health, for whatever reason.
        slurm: default options of tools/make_slurm.py.
        cores: CPU cores that ranks share if the accelerators are CPUs; more ranks than cores slow each other down.
        call_busy, bytes_busy: fractions of a collective's latency, and of the time of its bytes, in which it keeps a
            core busy; while it waits, other ranks may use the core.
    """

    name: str
    accelerator: str
    levels: tuple[NetworkLevel, ...] = Field(min_length=1)
    source: str
    call_us: AtLeast0 = 0
    is_degraded: bool = False
    slurm: SlurmDefaults = SlurmDefaults()
    cores: Ranks | None = None
    call_busy: float = Field(default=1, ge=0, le=1)
    bytes_busy: float = Field(default=1, ge=0, le=1)

    @field_validator("levels")
    @classmethod
    def _grow(cls, levels: tuple[NetworkLevel, ...]) -> tuple[NetworkLevel, ...]:
        """Return the levels; raises ValueError where one is not larger than the level below."""
        if any(outer.ranks <= inner.ranks for inner, outer in pairwise(levels)):
            raise ValueError("each level must have more ranks than the one before it")
        return levels

    def slowdown(self, num_ranks: int) -> float:
        """Return the factor by which ranks that share cores are slower than one rank alone."""
        return max(1.0, min(num_ranks, self.node_ranks) / self.cores) if self.cores else 1.0

    @property
    def node_ranks(self) -> int:
        """Ranks of a node: of the level of that name, or of the last one below the network."""
        named = (level.ranks for level in self.levels if level.name == "node")
        return next(named, self.levels[-min(2, len(self.levels))].ranks)


T = TypeVar("T", bound=HardwareFile)


def load_accelerator(name: str, folder: Path = FOLDER) -> Accelerator:
    """Load an accelerator by its name, such as `a100`, or by the path of a YAML file.

    Raises UserError if it is unknown or has no `kernels`.
    """
    found = _load(name, folder, Accelerator, "accelerator")
    if found.kernels is None:
        file = name if _is_path(name) else f"{folder.name}/{name}.yaml"
        raise UserError(f"accelerator {name}: only its peak is known; add `kernels` to {file}")
    return found


def load_cluster(name: str, folder: Path = CLUSTERS) -> Cluster:
    """Load a cluster by its name, such as `selene`, or by the path of a YAML file.

    A path that the file gives for its accelerator starts at the file's folder.
    """
    found = _load(name, folder, Cluster, "cluster")
    if _is_path(found.accelerator):
        start = Path(name).parent if _is_path(name) else folder
        return found.model_copy(update={"accelerator": str(start / found.accelerator)})
    return found


def file_names(folder: Path) -> list[str]:
    """Return the names of the YAML files of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _load(name: str, folder: Path, kind: type[T], what: str) -> T:
    path = Path(name) if _is_path(name) else folder / f"{name}.yaml"
    if not _is_file(path):
        hint = "; run tools/calibrate.py to write local.yaml" if name == "local" else ""
        known = ", ".join(file_names(folder)[:20]) or "a file"
        raise UserError(f"{what} {shorten(name)}: there is none; use {known}{hint}")
    try:
        return kind.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(
            *(f"{path.name}: {shorten('.'.join(map(str, each['loc'])))}: {each['msg']}" for each in error.errors()[:10])
        ) from error


def _is_path(name: str) -> bool:
    """Return whether a name is the path of a YAML file, and not the name of a file of the package."""
    return name.endswith((".yaml", ".yml"))


def _is_file(path: Path) -> bool:
    """Return whether there is a file of this name, which may be too long for one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class DeviceModel:
    """Kernel times of an accelerator in one precision.

    Attributes:
        peak: FLOP/s.
        plain_peak: FLOP/s without Tensor Cores; `fp8_peak`: of fp8 operands, 0 without Tensor Cores of fp8.
        capability: compute capability of an NVIDIA GPU.
        slowdown: factor by which ranks that share its units are slower than one alone.
        fitted: fitted factors of the framework whose kernels run.
    """

    kernels: KernelRates
    peak: float
    plain_peak: float
    itemsize: int
    slowdown: float = 1.0
    fitted: FittedTerms = NEUTRAL
    fp8_peak: float = 0.0
    capability: tuple[int, int] | None = None

    def multiplies_fp8(self, recipe_name: str, precision: str) -> bool:
        """Return whether GEMMs read fp8 operands of a recipe."""
        return self.fp8_peak > 0 and has_kernel(recipe_name, self.capability, precision)

    def as_kind(self, kind: GemmKind) -> DeviceModel:
        """Return the device as GEMMs of operands of this kind find it; the ramp takes the same time of each."""
        if kind is GemmKind.NATIVE:
            return self
        kernels = self.kernels
        peak, itemsize = (self.fp8_peak, 1) if kind is GemmKind.FP8 else (self.plain_peak, max(self.itemsize, 4))
        fraction = (kernels.fp8_fraction if kind is GemmKind.FP8 else None) or kernels.matmul_fraction
        rate = peak * fraction / (self.peak * kernels.matmul_fraction)
        changed = {"matmul_fraction": fraction, "ramp_k": kernels.ramp_k * rate}
        return replace(self, kernels=kernels.model_copy(update=changed), peak=peak, itemsize=itemsize)

    def gemm_s(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """Return the seconds of `batch` GEMMs Y[m, n] = X[m, k] W[k, n].

        Tensor Cores load 16 bytes at a time: a batch of GEMMs whose rows are no multiples of them does without.
        """
        if not min(m, n, k, batch):
            return 0.0
        kernels = self.kernels
        is_aligned = batch == 1 or not any(size * self.itemsize % LOAD_BYTES for size in (n, k))
        unit = (self.peak if is_aligned else self.plain_peak) * kernels.matmul_fraction / kernels.num_units
        compute = min(
            math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch / kernels.num_units)
            * (2 * rows * columns * (k + kernels.ramp_k) / (unit * fraction))
            for rows, columns, fraction in kernels.tiles
        )
        sizes = (m * k + k * n) * self.itemsize + m * n * max(self.itemsize, 2)  # no result is in fp8
        moved = sizes * batch / kernels.bytes_per_s
        return self.launched(max(self.fitted.products * compute, moved))

    def memory_bound_s(self, num_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of `kernels` memory-bound kernels that move `num_bytes` in all."""
        seconds = self.fitted.memory * num_bytes / self.kernels.bytes_per_s
        return self.launched(seconds, kernels) if num_bytes else 0.0

    def matmul_bound_s(self, flops: float) -> float:
        """Return the seconds of large GEMMs of `flops`."""
        return flops / (self.peak * self.kernels.matmul_fraction)

    def attention_s(self, flops: float, backward: bool) -> float:
        """Return the seconds of fused attention of `flops`."""
        if not flops:
            return 0.0
        seconds = flops / (self.peak * self.kernels.attention_fractions[backward])
        return self.launched(self.fitted.attention * seconds)

    def launched(self, seconds: float, kernels: int = 1) -> float:
        """Return `seconds` of `kernels` kernels with their launch times."""
        launch = kernels * self.kernels.launch_us * 1e-6
        return self.slowdown * (seconds + launch if self.kernels.adds_launch else max(seconds, launch))

    @property
    def comm_tax(self) -> float:
        """Slowdown of computation per second of communication that it overlaps with."""
        return self.kernels.comm_units / self.kernels.num_units + self.fitted.hidden_tax


def device_model(accelerator: Accelerator, precision: str, itemsize: int, slowdown: float = 1.0) -> DeviceModel:
    """Return an accelerator's kernel times in a training precision.  Raises UserError if it lacks that precision."""
    if precision not in accelerator.peak_tflops or precision == FP8:
        known = ", ".join(each for each in accelerator.peak_tflops if each != FP8)
        raise UserError(f"train.precision={precision}: {accelerator.device_names} does not compute in it; use {known}")
    assert accelerator.kernels is not None, "load_accelerator gives accelerators whose kernels are known"
    peak = accelerator.peak_tflops[precision]
    plain = min(peak, accelerator.peak_tflops.get("fp32", peak))
    return DeviceModel(
        accelerator.kernels,
        peak * 1e12,
        plain * 1e12,
        itemsize,
        slowdown,
        fp8_peak=accelerator.peak_tflops.get(FP8, 0.0) * 1e12,
        capability=accelerator.capability,
    )


@dataclass(frozen=True)
class Network:
    """A cluster's links for the ranks of a mesh, which are numbered from node to node.

    Attributes:
        slowdown: factor by which ranks that share CPU cores are slower.
        fitted: fitted terms of the framework whose collectives run.
    """

    cluster: Cluster
    slowdown: float = 1.0
    fitted: FittedTerms = NEUTRAL

    def seconds(self, call: Traffic, mesh: Mesh) -> float:
        """Return the seconds of one collective of a mesh, or of a send/recv to a neighbour."""
        if call.collective in ("send", "add", "shift"):
            return self.transfer_s(call.wire_bytes, mesh, call.axes)
        members = self._members(mesh, call.axes)
        ranks = members[-1]
        if ranks == 1:
            return 0.0
        rounds = 2 if call.collective == "all_reduce" else 1
        latency_s = (self.cluster.call_us + self.fitted.call_us) * 1e-6 + self._latency_s(members, rounds)
        bytes_s = self._byte_factor(members) * call.wire_bytes / self._bottleneck(members)[0]
        return self._shared(latency_s, bytes_s, ranks / mesh.world_size)

    def transfer_s(self, num_bytes: float, mesh: Mesh, axes: Axes) -> float:
        """Return the seconds of a send from each rank to its neighbour along an axis."""
        members = self._members(mesh, axes)
        # The neighbour that is farthest away counts: some rank has it.
        crossed = [level for level, count in zip(self.cluster.levels, members, strict=True) if count > 1]
        level = (crossed or self.cluster.levels)[-1]
        latency_s = (level.latency_us + self.fitted.call_us) * 1e-6
        bytes_s = self._byte_factor(members) * num_bytes / (level.gb_s * 1e9)
        return self._shared(latency_s, bytes_s, min(2 / mesh.world_size, 1.0))

    @cached_property
    def _known_members(self) -> dict[tuple[object, object, Axes], list[int]]:
        return {}

    def _members(self, mesh: Mesh, axes: Axes) -> list[int]:
        """Return `members_by_level`, which the search of a planner asks for a hundred thousand times."""
        key = mesh.axes, mesh.pieces, axes
        if key not in self._known_members:
            self._known_members[key] = members_by_level(self.cluster, mesh, axes)
        return self._known_members[key]

    def _byte_factor(self, members: list[int]) -> float:
        """Return the fitted time of bytes relative to the links': it grows with the nodes of a group."""
        nodes = _num_nodes(members)
        return self.fitted.outer * nodes**self.fitted.fall if nodes > 1 else self.fitted.inner

    def _shared(self, latency_s: float, bytes_s: float, part: float) -> float:
        """Return the seconds of a collective of a fraction `part` of all ranks, which share CPU cores.

        Its CPU work slows down, and so does that of the ranks that it waits for in each step; while bytes are in
        flight, all ranks compute.  Measured with 2, 4 and 8 ranks on 2 cores, in groups of all ranks and of pairs.
        """
        slowdown, least = self.slowdown, 1 / self.slowdown
        busy, waits = self.cluster.call_busy, max(slowdown * part**2, least)
        latency_s *= busy * slowdown + (1 - busy) * waits
        busy, waits = self.cluster.bytes_busy, max(part, least)
        return latency_s + bytes_s * (busy * slowdown + (1 - busy) * waits)

    def num_nodes(self, mesh: Mesh, axes: Axes) -> int:
        """Return the number of nodes of a group."""
        return _num_nodes(self._members(mesh, axes))

    def bottleneck(self, mesh: Mesh, axes: Axes) -> tuple[float, NetworkLevel]:
        """Return the bytes per second of a ring along axes, and the level that limits it."""
        return self._bottleneck(self._members(mesh, axes))

    def _latency_s(self, members: list[int], rounds: int) -> float:
        """Return the latency of a ring inside the innermost level, and of a tree, or a shorter ring, over its units."""
        is_ring = rounds == 1
        total, below = is_ring * (_num_nodes(members) - 1) * self.fitted.hop_us * 1e-6, 1
        for level, count in zip(self.cluster.levels, members, strict=True):
            units = count // below
            steps = units - 1 if is_ring else min(units - 1, math.ceil(math.log2(units))) if units > 1 else 0
            total += rounds * steps * level.latency_us * 1e-6
            below = count
        return total

    def _bottleneck(self, members: list[int]) -> tuple[float, NetworkLevel]:
        found, below = [], 1
        for level, count in zip(self.cluster.levels, members, strict=True):
            if count > below:
                links = count - 1 if level.is_pairwise else below
                found.append((links * level.gb_s * 1e9, level))
            below = count
        return min(found, key=lambda each: each[0])


def _num_nodes(members: list[int]) -> int:
    """Return the number of nodes of a group by its members in one unit of each level."""
    return members[-1] // (members[-2] if len(members) > 1 else members[-1])


def members_by_level(cluster: Cluster, mesh: Mesh, axes: Axes) -> list[int]:
    """Return how many ranks of a group are in one unit of each level; the last level holds all."""
    group = sorted(mesh.at(0).ranks(axes))
    counts = [sum(rank < level.ranks for rank in group) for level in cluster.levels[:-1]]
    return [*counts, len(group)]
