"""Environment of the launcher: rank, world size and the address of rank 0.

torchrun: RANK, WORLD_SIZE, ...      srun: SLURM_PROCID, SLURM_NTASKS, ...
mpirun: OMPI_COMM_WORLD_RANK, ... of Open MPI, PMI_RANK, ... of MPICH and Intel MPI      none of them: one process
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import MAX_NUMBER, shorten, whole_number

_FIRST_PORT, _NUM_PORTS = 15000, 15000
# Between ports of neighbouring steps of a job, so that these are not those of the next jobs; coprime to `_NUM_PORTS`.
_STEP_STRIDE = 1009
# Variables of rank, world size, local rank and local world size.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MAX_PORT = 65535
_COUNTED_BY: Mapping[str, str] = {
    "none": "scripts/launch_local.sh N, torchrun, or srun start several",
    "torchrun": "torchrun --nnodes and --nproc-per-node",
    "mpirun": "mpirun -n",
    "srun": "srun --ntasks",
}


@dataclass(frozen=True)
class LauncherEnv:
    """Rank of this process among `world_size`, of which `local_world_size` are local; rank 0 is at address:port.

    Attributes:
        restarts_stopped: the launcher takes every exit code but 0 for a failure, also that of a stop on request.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "localhost"
    port: int = 0
    restarts_stopped: bool = False

    @property
    def counted_by(self) -> str:
        """What the user types to start another number of processes."""
        return _COUNTED_BY[self.launcher]

    def problems(self) -> list[str]:
        """Return what is wrong with the numbers."""
        rules = {
            f"the launcher gives world size {self.world_size}: it must be at least 1": self.world_size >= 1,
            f"the launcher gives rank {self.rank} in a world of {self.world_size}: ranks are 0 to "
            f"{self.world_size - 1}; start every process with the same world size": 0 <= self.rank < self.world_size,
            f"the launcher gives local rank {self.local_rank} of {self.local_world_size} processes on this machine: "
            f"local ranks start at 0": 0 <= self.local_rank < self.local_world_size,
            f"MASTER_PORT={self.port}: ports are 1 to {MAX_PORT}; use one that is free on rank 0's machine, such as "
            f"{_FIRST_PORT}": self.world_size <= 1 or 1 <= self.port <= MAX_PORT,
            f"the launcher gives {self.local_world_size} processes on this machine in a world of {self.world_size}: "
            f"a machine cannot hold more than all": self.local_world_size <= self.world_size,
        }
        return [problem for problem, holds in rules.items() if not holds]


@dataclass(frozen=True)
class SlurmJob:
    """SLURM job that this process belongs to.

    Attributes:
        job_id: number of the job, which a requeue does not change.
        num_requeues: how often the job was requeued.
        num_gpus: GPUs of the job on this machine.
        node, nodes: names of this machine, and of all machines of the job, in the form that `--exclude` takes.
    """

    job_id: int
    num_requeues: int
    num_gpus: int
    node: str
    nodes: str


def read_slurm_job(environ: Mapping[str, str]) -> SlurmJob:
    """Return the SLURM job of this process; raises UserError outside of one."""
    if "SLURM_JOB_ID" not in environ:
        raise UserError("SLURM_JOB_ID is not set: this program runs in a SLURM job; submit one as docs/slurm.md says")
    return SlurmJob(
        job_id=_number(environ, "SLURM_JOB_ID"),
        num_requeues=_number(environ, "SLURM_RESTART_COUNT", "0"),
        num_gpus=_number(environ, "SLURM_GPUS_ON_NODE", "0"),
        node=environ.get("SLURMD_NODENAME", "localhost"),
        nodes=environ.get("SLURM_JOB_NODELIST", "localhost"),
    )


def read_launcher_env(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the environment from torchrun's variables, else mpirun's or SLURM's, else of a single process.

    Raises:
        UserError: a variable is missing, is no number, or contradicts another.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        env = _torchrun(environ)
    elif _OPEN_MPI[0] in environ:  # also inside a SLURM job, whose variables then describe mpirun's own processes
        env = _mpi(environ, _OPEN_MPI)
    elif "SLURM_PROCID" in environ:
        env = _slurm(environ)
    elif _MPICH[0] in environ:
        env = _mpi(environ, _MPICH)
    else:
        env = LauncherEnv()
    UserError.collect(env.problems())
    return env


def first_host(node_list: str) -> str:
    """Return the first machine of a SLURM node list: `n[07-12,3],m1` -> `n07`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise UserError(f"the SLURM node list {node_list!r} names no machine; set MASTER_ADDR to rank 0's machine")
    return re.sub(r"\[([^\]]*)\]", lambda brackets: re.split("[-,]", brackets[1])[0], first[0])


def _torchrun(environ: Mapping[str, str]) -> LauncherEnv:
    needed = ["RANK", "WORLD_SIZE"]
    if environ.get("WORLD_SIZE") != "1":
        needed += ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    UserError.collect(
        f"{name} is not set next to {', '.join(other for other in needed if other in environ)}: start all processes "
        f"with torchrun or srun, or set {', '.join(needed)}"
        for name in needed
        if name not in environ
    )
    world_size = _number(environ, "WORLD_SIZE")
    return LauncherEnv(
        launcher="torchrun",
        rank=_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", "0"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", str(world_size)),
        address=environ.get("MASTER_ADDR", "localhost"),
        port=_number(environ, "MASTER_PORT", "0"),
        restarts_stopped="TORCHELASTIC_RUN_ID" in environ,
    )


def _mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> LauncherEnv:
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in names)
    if local_world_size < world_size and "MASTER_ADDR" not in environ:
        raise UserError(
            f"MASTER_ADDR is not set, but mpirun started only {local_world_size} of {world_size} processes on this "
            "machine: name rank 0's machine, such as mpirun -x MASTER_ADDR=node1 ..."
        )
    port = _FIRST_PORT + zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode()) % _NUM_PORTS
    return LauncherEnv(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=environ.get("MASTER_ADDR", "localhost"),
        port=_number(environ, "MASTER_PORT", str(port)),
    )


def _slurm(environ: Mapping[str, str]) -> LauncherEnv:
    tasks = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    world_size = _number(environ, tasks)
    if world_size > 1 and "MASTER_ADDR" not in environ and nodes not in environ:
        raise UserError(f"{nodes} is not set, but SLURM_PROCID is: start with srun, or set MASTER_ADDR")
    # Steps of one allocation that run at the same time on the same nodes have different ports.
    number = _number(environ, "SLURM_JOB_ID", "0") + _STEP_STRIDE * _number(environ, "SLURM_STEP_ID", "0")
    port = _FIRST_PORT + number % _NUM_PORTS
    return LauncherEnv(
        launcher="srun",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", "0" if world_size == 1 else None),
        local_world_size=_tasks_here(environ, world_size),
        address=environ.get("MASTER_ADDR") or first_host(environ.get(nodes, "localhost")),
        port=_number(environ, "MASTER_PORT", str(port)),
    )


def _tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Return the tasks on this machine, from SLURM's `4(x2),3` and the machine's position; all if they are not set."""
    written = environ.get(_first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), str(world_size))
    runs = [re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", run) for run in written.split(",")]
    counts = [int(run[1]) for run in runs if run for _ in range(int(run[2] or 1))]
    node = _number(environ, "SLURM_NODEID", "0")
    return counts[node] if node < len(counts) else world_size


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of `names` that is set, else the last."""
    return next((name for name in names if name in environ), names[-1])


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise UserError(
            f"{name} is not set, but other variables of its launcher are: start with srun, torchrun or mpirun"
        )
    number = whole_number(text.strip())
    if number is None or not 0 <= number <= MAX_NUMBER:
        raise UserError(f"{name}={shorten(text)!r}: must be a whole number of at least 0, and at most {MAX_NUMBER}")
    return number
