"""Accelerators and clusters as the YAML files of `hardware/` describe them.

An accelerator has rates of GEMMs and of memory-bound kernels, a cluster has a bandwidth per rank at each level:

    socket 2 ranks  <  node 8 ranks  <  network      a ring leaves each unit of a level by all its members' links
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron3d.config.yaml_origins import read_yaml
from megatron3d.errors import UserError
from megatron3d.runtime.limits import MAX_NUMBER, MAX_RANKS, shorten

FOLDER = Path(__file__).parents[2] / "hardware"
CLUSTERS = FOLDER / "clusters"

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
        matmul_fraction: fraction of the peak that the best large GEMM sustains.
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
    tile_fractions: Mapping[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$")], Share] = Field(
        min_length=1
    )
    num_units: Ranks
    ramp_k: AtLeast0
    attention_fractions: tuple[Share, Share]
    launch_us: AtLeast0
    adds_launch: bool = False
    comm_units: int = Field(0, ge=0, le=MAX_RANKS)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that long memory-bound kernels reach."""
        return self.stream_gb_s * 1e9 * self.stream_fraction

    @property
    def tiles(self) -> tuple[tuple[int, int, float], ...]:
        """Rows, columns and fraction of the peak of each tile."""
        split = ((name.partition("x"), fraction) for name, fraction in self.tile_fractions.items())
        return tuple((int(rows), int(columns), fraction) for (rows, _, columns), fraction in split)


class Accelerator(HardwareFile):
    """An accelerator; without `kernels` only its peak is known."""

    device_names: str
    peak_tflops: Mapping[str, Above0]
    source: str
    kernels: KernelRates | None = None


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
    slurm: SlurmDefaults = SlurmDefaults()
    cores: Ranks | None = None
    call_busy: float = Field(1, ge=0, le=1)
    bytes_busy: float = Field(1, ge=0, le=1)

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
