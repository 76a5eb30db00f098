"""Coordinates of a rank in data, pipeline and tensor parallelism, as Megatron's `parallel_state` gives them.

    world_size = TP x CP x PP x DP,      DP = replicas (HSDP) x data-parallel shards

    ranks = arange(world_size).reshape(pipeline, replica, data, *context axes, *tensor axes)   # the last varies fastest

Eight ranks with TP 2 (one tensor axis t), PP 2 and DP 2:

    pipeline rank 0     t=0  t=1           pipeline rank 1     t=0  t=1
    data=0               0    1            data=0               4    5
    data=1               2    3            data=1               6    7

    tensor-parallel groups   0 1 | 2 3 | 4 5 | 6 7
    data-parallel groups     0 2 | 1 3 | 4 6 | 5 7
    pipeline groups          0 4 | 1 5 | 2 6 | 3 7

`RunSpec.parallel_state` is the state of a run.  It is a value that is passed; no module holds a current one.

    Megatron-LM (megatron/core/parallel_state.py)           here
    get_tensor_model_parallel_rank(), _world_size()         .mesh.index(state.tensor_axes), .tensor_parallel_size
    get_pipeline_model_parallel_rank(), _world_size()       .pipeline_parallel_rank, .pipeline_parallel_size
    get_data_parallel_rank(), _world_size()                 .data_parallel_rank, .data_parallel_size
    get_context_parallel_rank(), _world_size()              .mesh.index(mesh.context), .mesh.size(mesh.context)
    get_*_parallel_group()                                  .group(state.tensor_axes), .pipeline_parallel_group, ...
    get_pipeline_model_parallel_first_rank(), _last_rank()  .pipeline_parallel_group[0], [-1]
    is_pipeline_first_stage(), is_pipeline_last_stage()     Stage.has_embedding, Stage.has_head
    num_distributed_optimizer_instances                     .mesh.sizes[REPLICA] (the replicate degree of HSDP)
    initialize_model_parallel()                             ProcessComm(state.mesh, state.group_axes, state.links)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron3d.errors import UserError
from megatron3d.parallel.mesh import DATA, PIPELINE, Axes, Link, Mesh, Sizes

REPLICA, SHARD = DATA


@dataclass(frozen=True)
class ParallelSizes:
    """Factors of the world size; data parallelism takes the ranks that the others leave.

    Attributes:
        tensor: TP, the product of the tensor axes.
        pipeline: PP, the number of pipeline ranks.
        replicas: HSDP's replicate degree, of which each replica holds everything; divides the data-parallel size.
        context: CP, the number of ranks that split the positions of a sequence.
    """

    world_size: int
    tensor: int
    pipeline: int
    replicas: int = 1
    context: int = 1

    @property
    def model(self) -> int:
        """TP x CP x PP: the ranks that compute a microbatch together."""
        return self.tensor * self.context * self.pipeline

    @property
    def factors(self) -> str:
        """These factors as text."""
        context = f"CP {self.context} x " if self.context > 1 else ""
        return f"{context}PP {self.pipeline}"

    @property
    def data(self) -> int:
        """DP: the ranks between which a global batch is divided, replicas included."""
        return self.world_size // self.model

    @property
    def shards(self) -> int:
        """Data-parallel ranks of one replica; ZeRO shards over these and the context ranks."""
        return self.data // self.replicas

    @property
    def mismatch(self) -> str | None:
        """Error if the world size violates `world_size = TP x CP x PP x DP`; None if it does not."""
        if self.world_size % self.model == 0 and self.world_size > 0:
            return None
        return "fewer than" if self.world_size < self.model else "not a multiple of"

    def mesh(self, inner_axes: Sizes, rank: int = 0, pieces: tuple[tuple[str, Sizes], ...] = ()) -> Mesh:
        """Return the grid of ranks, seen from `rank`, with the context and tensor axes last, and `pieces` of axes.

        Raises UserError where the factors do not make the world.
        """
        if self.mismatch:
            made = f"TP {self.tensor} x {self.factors} = {self.model}"
            raise UserError(f"world_size {self.world_size}: {self.mismatch} {made}; use a multiple of {self.model}")
        if self.data % self.replicas:
            raise UserError(
                f"parallel.num_distributed_optimizer_instances={self.replicas}: does not divide the data parallel size "
                f"{self.data}; use 1"
            )
        outer = (PIPELINE, self.pipeline), (REPLICA, self.replicas), (SHARD, self.shards)
        return Mesh((*outer, *inner_axes), rank, pieces)


@dataclass(frozen=True)
class ParallelState:
    """The place of one rank among all ranks of a run.

    Groups are tuples of global ranks in the order of the rank within the group.

    Attributes:
        mesh: the grid of ranks, seen from this one.
        group_axes: sets of mesh axes that the run communicates over, a process group each, in the order of creation.
        links: pairs of pipeline ranks that send to each other.
    """

    mesh: Mesh
    group_axes: tuple[Axes, ...] = ()
    links: tuple[Link, ...] = ()

    def on_rank(self, rank: int) -> ParallelState:
        """Return the state of another rank of the same run."""
        return replace(self, mesh=self.mesh.at(rank))

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of ranks: TP x CP x PP x DP."""
        return self.mesh.world_size

    @property
    def tensor_axes(self) -> Axes:
        """Mesh axes of the tensor-parallel mode, such as `t`, or `x`, `y` and `z`."""
        return tuple(name for name in self.mesh.names if name not in (PIPELINE, *DATA, *self.mesh.context))

    def group(self, axes: Axes) -> tuple[int, ...]:
        """Return the global ranks that differ from this one along `axes` only, the first of `axes` slowest."""
        return self.mesh.ranks(axes)

    # Tensor parallelism

    @property
    def tensor_parallel_size(self) -> int:
        """Size of the tensor-parallel group (TP)."""
        return self.mesh.size(self.tensor_axes)

    # Pipeline parallelism

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank within the pipeline."""
        return self.mesh.coord(PIPELINE)

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline ranks (PP)."""
        return self.mesh.sizes[PIPELINE]

    @property
    def pipeline_parallel_group(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, in its order."""
        return self.group((PIPELINE,))

    @property
    def my_links(self) -> tuple[Link, ...]:
        """Links of which this rank is one end."""
        return tuple(link for link in self.links if self.mesh.coord(link.axis) in link.ends)

    # Data parallelism

    @property
    def data_parallel_rank(self) -> int:
        """Rank among those that train on other sequences, replicas slowest."""
        return self.mesh.index(DATA)

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks (DP): replicas x shards."""
        return self.mesh.size(DATA)
