"""What a machine can do, as its YAML in `hardware/` says: an accelerator's kernels, and a cluster's links.

An accelerator's time for a product and for a pass over memory, and a cluster's bandwidth per rank at each level:

    socket 2 ranks  <  node 8 ranks  <  network      a ring leaves each unit of a level by all its members' links
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron3d.errors import UserError

FOLDER = Path(__file__).parents[2] / "hardware"
CLUSTERS = FOLDER / "clusters"

Above0 = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class HardwareFile(BaseModel):
    """A part of a YAML file: no unknown keys, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KernelRates(HardwareFile):
    """What an accelerator's kernels reach.

    Attributes:
        memory_gib: of device memory that tensors can use.
        stream_gb_s: bandwidth of device memory by data sheet; `stream_fraction` of it is reached by long passes.
        matmul_fraction: of the peak that the best large product sustains.
        tile_fractions: of that, by the size of a unit's tile of the output; smaller tiles read more per operation.
        num_units: multiprocessors, which each compute a tile at a time.
        ramp_k: what filling and draining a tile's pipeline costs, as additional length of K.
        attention_fractions: of the peak, that fused causal attention reaches forward and backward.
        launch_us: least time between two kernels.
        adds_launch: whether that is added to each kernel's time (a processor), or hidden under it where it is longer.
        comm_units: multiprocessors that a collective keeps busy under computation.
    """

    memory_gib: Above0
    stream_gb_s: Above0
    stream_fraction: Share
    matmul_fraction: Share
    tile_fractions: Mapping[Annotated[str, Field(pattern=r"^\d+x\d+$")], Share] = Field(min_length=1)
    num_units: int = Field(ge=1)
    ramp_k: float = Field(ge=0)
    attention_fractions: tuple[Share, Share]
    launch_us: float = Field(ge=0)
    adds_launch: bool = False
    comm_units: int = Field(0, ge=0)

    @property
    def bytes_per_s(self) -> float:
        """Of long passes over memory."""
        return self.stream_gb_s * 1e9 * self.stream_fraction

    @property
    def tiles(self) -> tuple[tuple[int, int, float], ...]:
        """Rows, columns and fraction of each tile."""
        split = ((name.partition("x"), fraction) for name, fraction in self.tile_fractions.items())
        return tuple((int(rows), int(columns), fraction) for (rows, _, columns), fraction in split)


class Accelerator(HardwareFile):
    """A device; without `kernels` its peak alone is known."""

    device_names: str
    peak_tflops: Mapping[str, Above0]
    source: str
    kernels: KernelRates | None = None


class NetworkLevel(HardwareFile):
    """Ranks that are joined in one way.

    Attributes:
        ranks: of a unit of this level, the units below included.
        gb_s: that each rank of a unit can send out of the unit below it, all of them at one time.
        is_pairwise: each two ranks have a link of their own of `gb_s`, so that rings through more ranks are faster.
        latency_us: of one step of a collective.
    """

    name: str
    ranks: int = Field(ge=1)
    gb_s: Above0
    is_pairwise: bool = False
    latency_us: float = Field(ge=0)


class SlurmDefaults(HardwareFile):
    """What jobs of a cluster need: options of sbatch (null: without a value), and lines of shell before the start."""

    options: Mapping[str, str | int | None] = {}
    setup: tuple[str, ...] = ()


class Cluster(HardwareFile):
    """Accelerators and the levels that join them, from the inside to the outside.

    Attributes:
        call_us: of every collective beside its steps: starting it, and waiting for ranks that come late.
        slurm: for tools/make_slurm.py.
        cores: processors that ranks share, where the accelerators are processors: with more ranks, each is slower.
        call_busy, bytes_busy: shares of a call's latency, and of the time of its bytes, in which it keeps a processor
            busy; while it waits, other ranks may have that.
    """

    name: str
    accelerator: str
    levels: tuple[NetworkLevel, ...] = Field(min_length=1)
    source: str
    call_us: float = Field(0, ge=0)
    slurm: SlurmDefaults = SlurmDefaults()
    cores: int | None = Field(None, ge=1)
    call_busy: float = Field(1, ge=0, le=1)
    bytes_busy: float = Field(1, ge=0, le=1)

    def slowdown(self, num_ranks: int) -> float:
        """By how much ranks that share cores are slower than one alone."""
        return max(1.0, min(num_ranks, self.node_ranks) / self.cores) if self.cores else 1.0

    @property
    def node_ranks(self) -> int:
        """Ranks of a node: of the last level but the network."""
        return self.levels[-2].ranks if len(self.levels) > 1 else self.levels[-1].ranks


T = TypeVar("T", bound=HardwareFile)


def load_accelerator(name: str, folder: Path = FOLDER) -> Accelerator:
    """The accelerator of a name such as `a100`; UserError where there is none, or its kernels are not known."""
    found = _load(name, folder, Accelerator, "accelerator")
    if found.kernels is None:
        raise UserError(f"accelerator {name}: only its peak is known; add `kernels` to {folder.name}/{name}.yaml")
    return found


def load_cluster(name: str, folder: Path = CLUSTERS) -> Cluster:
    """The cluster of a name such as `selene`, or of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return _load(Path(name).stem, Path(name).parent, Cluster, "cluster")
    return _load(name, folder, Cluster, "cluster")


def file_names(folder: Path) -> list[str]:
    """Names of the files of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _load(name: str, folder: Path, kind: type[T], what: str) -> T:
    path = folder / f"{name}.yaml"
    if not path.is_file():
        hint = "; run tools/calibrate.py to write local.yaml" if name == "local" else ""
        raise UserError(f"{what} {name}: there is none; use {', '.join(file_names(folder)) or 'a file'}{hint}")
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise UserError(
            *(f"{path.name}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        ) from error
