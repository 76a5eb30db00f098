"""Process of one rank: the only module that reads the environment, handles signals or starts torch.distributed.

torch is imported by `start`, not by this file: a configuration is checked, and a bad one refused, without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron3d.errors import ExitCode, RunFailed, UserError, one_line
from megatron3d.runtime import machine
from megatron3d.runtime.arguments import ToolParser, whole_number
from megatron3d.runtime.launcher_env import LauncherEnv, SlurmJob, read_launcher_env, read_slurm_job
from megatron3d.runtime.program import exit_code_of, flush

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from megatron3d.runtime.members import Members
    from megatron3d.runtime.watchdog import Losses, Watchdog

T = TypeVar("T")
ADDRESS_S = 20.0
# Ranks that wait for what a person types, or a client asks, meet in a barrier this often, which is progress.
IDLE_S = 10.0
# What torch says where another rank's process has ended.
_LOST = re.compile("gloo|nccl|connection|broken pipe|socket|timed out", re.IGNORECASE)
# A rank but the first waits so long with its error: for rank 0, and for each rank of its machine before it.
TELL_S, TELL_AFTER_S = 1.0, 0.3
# The store ends with the process of rank 0, which so long waits for ranks that may still read it; one may have died.
LEAVE_S, LEAVE_AFTER_ERROR_S, LEAVE_INTERVAL_S = 20.0, 3.0, 0.02


@dataclass(frozen=True)
class Runtime:
    """Rank of this process, and the device that it computes on.

    Attributes:
        settings: what the process was set up with, by name, for the startup report.
        members: all processes of an elastic run; None: the run ends when a rank is lost.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    watchdog: Watchdog | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    members: Members | None = None

    def in_epoch(self) -> Runtime:
        """Return this process under the rank that it has now in an elastic run."""
        assert self.members is not None, "only an elastic run has other ranks later"
        env = self.members.env
        return replace(self, rank=env.rank, world_size=env.world_size, watchdog=self.members.watchdog)


def launcher_env() -> LauncherEnv:
    """Return this process's rank and world size, from the variables of its launcher."""
    return read_launcher_env(os.environ)


def slurm_job() -> SlurmJob:
    """Return the SLURM job that this process belongs to; raises UserError outside of one."""
    return read_slurm_job(os.environ)


@contextlib.contextmanager
def start(
    timeout_s: float = 600.0,
    on_cpu: bool = False,
    shares_gpus: bool = False,
    deterministic: bool = False,
    *,
    elastic: bool = False,
    joined: Path | None = None,
) -> Iterator[Runtime]:
    """Choose the device and set up torch.distributed with the other ranks; tear it down at the end.

    Args:
        timeout_s: limit for a rank without progress, and for the rendezvous.
        on_cpu: compute on the CPU even if there is a GPU.
        shares_gpus: let several ranks compute on one GPU; they communicate over gloo, through host memory.
        deterministic: choose kernels that give the same bits in every run.
        elastic: the processes can go on without some of them, unless the launcher ends them all then.
        joined: folder of the elastic run under way that each of the processes joins; None: they begin a run.
    """
    import torch

    env = launcher_env()
    machine.raise_open_file_limit()
    settings = machine.set_up_determinism(os.environ, deterministic)
    machine.sum_gemms_in_fp32()
    if not on_cpu and torch.cuda.is_available():  # before the first call that starts CUDA
        settings |= machine.set_up(os.environ, timeout_s)
    device = torch.device("cpu") if on_cpu else _device(env, shares_gpus)
    if device.type == "cpu":
        machine.keep_freed_memory()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // env.local_world_size))
    else:
        settings |= _use_cpus_next_to(device, env)
    if joined is not None and not (elastic and outlives_others(env)):
        raise UserError("--join: only with train.elastic=true, and not under torchrun, which ends all ranks with one")
    if env.world_size == 1 and joined is None:
        yield Runtime(0, 1, env.local_rank, device, settings=settings)
        return
    skip_name_lookups()
    backend = machine.CPU_BACKEND if shares_gpus else machine.backend_of(device.type)
    here = Runtime(env.rank, env.world_size, env.local_rank, device, settings=settings)
    if elastic and outlives_others(env):
        with _members(env, backend, timeout_s, joined) as members:
            yield replace(here, watchdog=members.watchdog, members=members)
        return
    with _process_group(env, backend, timeout_s), _watchdog(env, backend, timeout_s, _attempt()) as watchdog:
        yield replace(here, watchdog=watchdog)


def skip_name_lookups() -> None:
    """Let torch's stores show addresses as numbers.

    Both ends of each connection otherwise ask a name server for the other's name, for lines of a log.  Meanwhile a
    store answers nobody: a name server that drops one question costs all ranks five seconds.  torch asks no more once
    an answer was not to be had for the moment, so one question is let fail.
    """
    import torch.distributed as dist

    with machine.without_name_servers():
        dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def outlives_others(env: LauncherEnv) -> bool:
    """Return whether a process can go on when another one has ended, as torchrun's agent lets none."""
    from megatron3d.runtime.connections import can_shut_down

    return not env.restarts_stopped and can_shut_down()


@contextlib.contextmanager
def _members(env: LauncherEnv, backend: str, timeout_s: float, joined: Path | None) -> Iterator[Members]:
    """Connect the processes of an elastic run; at the end take leave of those of its last epoch."""
    from megatron3d.runtime.members import Members

    with Members(env, _Connect(backend, timeout_s), timeout_s, joined) as members:
        try:
            yield members
        except (RunFailed, UserError):
            members.end(ExitCode.CRASH)
            raise


class _Connect:
    """Connects and watches the ranks of an epoch of an elastic run."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s

    def meet(self, env: LauncherEnv, epoch: int) -> TCPStore:
        return _rendezvous(env, self._backend, self._timeout_s, epoch, is_server=env.rank == 0 and epoch == 0)

    def watch(self, env: LauncherEnv, epoch: int, losses: Losses) -> Watchdog:
        return _watchdog(env, self._backend, self._timeout_s, epoch, losses)


def _watchdog(env: LauncherEnv, backend: str, timeout_s: float, attempt: int, losses: Losses | None = None) -> Watchdog:
    """Return a watchdog that ends this process after `timeout_s` without progress; the launcher ends the others."""
    from megatron3d.runtime.heartbeat import TcpStatusStore
    from megatron3d.runtime.watchdog import Watchdog

    store = TcpStatusStore(env.address, env.port, attempt)
    recorder = flight_recorder(backend) if os.environ.get("TORCH_FR_BUFFER_SIZE") != "0" else bytes
    return Watchdog(store, env.rank, env.world_size, timeout_s, _exit_immediately, recorder, losses=losses)


def flight_recorder(backend: str) -> Callable[[], bytes]:
    """Return the function that pickles the collectives that torch has recorded; it returns nothing if torch cannot.

    NCCL's are in a recorder of their own.  Stacks are left out: they take seconds, and heartbeats have them.
    """
    import torch

    name = "_dump_fr_trace" if backend == machine.CPU_BACKEND else "_dump_nccl_trace"
    dump: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, name, None)
    return bytes if dump is None else lambda: dump(includeStackTraces=False)


def limit_threads(num_ranks: int) -> None:
    """Divide the cores among ranks that this process will fork; torch, not imported yet, reads the environment."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cores() // num_ranks or 1))


def become_rank(rank: int, num_ranks: int, port: int) -> None:
    """Give this process, forked by a launcher, the environment of one of its ranks on this machine."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    texts = {name: str(value) for name, value in (values | {"MASTER_PORT": port}).items()}
    os.environ.update({"MASTER_ADDR": "localhost"} | texts)


def _attempt() -> int:
    """Return how often torchrun has restarted these ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _exit_immediately(code: int = ExitCode.CRASH) -> None:
    """End the process without the usual clean-up, which would wait for collectives that no other rank joins."""
    flush(limit_s=2.0)
    os._exit(code)


def launch(num_ranks: int, rank: Callable[..., T], *args: object) -> T:
    """Run `rank(*args)` in `num_ranks` processes on this machine with torchrun's launcher; return rank 0's result.

    They are forked from a process that imports the module of `rank` once.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    set_forkserver_preload(["torch.distributed", rank.__module__])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id=rank.__name__,
        start_method="forkserver",
    )
    results: dict[int, T] = elastic_launch(config, rank)(*args)
    return results[0]


def _device(env: LauncherEnv, shares_gpus: bool = False) -> torch.device:
    """Return the GPU of the local rank, or the only one that its launcher left visible; the CPU if there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    bound_by_launcher = visible == 1 and env.launcher in ("srun", "mpirun")
    index = 0 if bound_by_launcher else env.local_rank % visible if shares_gpus else env.local_rank
    if index >= visible:
        raise UserError(
            f"{env.local_world_size} processes on this machine, but {visible} GPU(s): start at most {visible}, "
            f"or compute on the CPU with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def num_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _use_cpus_next_to(device: torch.device, env: LauncherEnv) -> dict[str, str]:
    """Bind this process to the CPUs next to its GPU, and choose the threads of CPU operators; return the settings."""
    import torch

    cores = num_cores()
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    bound = machine.bind_to_gpu(address, os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(machine.num_threads(cores, env.local_world_size))
    return {"CPUs of rank 0": bound, "threads of CPU operators": str(torch.get_num_threads())}


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _process_group(env: LauncherEnv, backend: str, timeout_s: float) -> Iterator[None]:
    import torch.distributed as dist

    attempt = _attempt()
    is_server = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _rendezvous(env, backend, timeout_s, attempt, is_server)
    try:
        yield
    except (RunFailed, UserError):  # which all ranks raise, the last one when it has read the others' problems
        _take_leave(store, env, attempt, LEAVE_AFTER_ERROR_S if is_server else 0.0)
        raise
    dist.destroy_process_group()
    _take_leave(store, env, attempt, LEAVE_S if is_server else 0.0)


def _rendezvous(env: LauncherEnv, backend: str, timeout_s: float, attempt: int, is_server: bool) -> TCPStore:
    """Make the process group of all ranks, and return the store that they meet at, which one of them serves."""
    import torch.distributed as dist

    # No device_id: with one, torch splits each new communicator off the world's, for which every rank would have to
    # create every group, also those of other ranks' links.
    _require_address(env, timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            env.address,
            env.port,
            env.world_size,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
        dist.init_process_group(
            backend,
            # torchrun's store outlives the ranks that it restarts, and still has the addresses of the ended ranks.
            store=dist.PrefixStore(f"attempt {attempt}", store),  # type: ignore[attr-defined]
            rank=env.rank,
            world_size=env.world_size,
            timeout=machine.group_timeout(timeout_s),
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {env.rank} of {env.world_size}: rendezvous at {env.address}:{env.port} failed within "
            f"{timeout_s:.0f} s ({reason}): check that all were started and that the port is free and reachable"
        ) from error
    return store


def _require_address(env: LauncherEnv, timeout_s: float) -> None:
    """Wait until the address of rank 0's machine is known, as a cluster's names are some time after its machines start.

    Raises UserError after `timeout_s`, at most `ADDRESS_S`.
    """
    end_s = time.monotonic() + min(timeout_s, ADDRESS_S)
    while True:
        try:
            socket.getaddrinfo(env.address, env.port)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > end_s:
                raise UserError(
                    f"MASTER_ADDR={env.address}: no machine of this name is known here ({error}); name rank 0's "
                    "machine as the other machines know it, or give its IP address"
                ) from error
        else:
            return
        time.sleep(0.2)


def _take_leave(store: TCPStore, env: LauncherEnv, attempt: int, limit_s: float) -> None:
    """Say that this rank does not use the store any more; wait up to `limit_s` until all ranks have said so."""
    key, end_s = f"left attempt {attempt}", time.monotonic() + limit_s
    with contextlib.suppress(RuntimeError):  # the process that serves it did not wait for so long
        num_left = store.add(key, 1)
        while num_left < env.world_size and time.monotonic() < end_s:
            time.sleep(LEAVE_INTERVAL_S)
            num_left = store.add(key, 0)


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a world whose other ranks do not exist: collectives return the right shapes, not values."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(machine.FAKE_BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_program(main: Callable[[], int]) -> int:
    """Return the exit code of `main`; a UserError or OSError becomes messages on stderr.

    With several ranks a failure ends the process immediately: the usual clean-up would wait for collectives that no
    other rank joins.
    """
    # Before torch is imported: it prints a C++ stack per rank where another one has ended, which is said below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ToolParser.before_error = let_rank_0_tell
    try:
        code = exit_code_of(main, _print_errors, "interrupted")
    except Exception as error:
        if _env_or_default().world_size == 1:
            raise
        lost = lost_rank(error)
        _print_errors((f"ends, since another rank has ended: {lost}" if lost else traceback.format_exc(),))
        code = ExitCode.CRASH
    if code not in (ExitCode.DONE, ExitCode.STOPPED) and _env_or_default().world_size > 1:
        _exit_immediately(code)
    return code


def lost_rank(error: Exception) -> str | None:
    """Return one line for a collective that failed since another rank has ended, whose own message says why."""
    from megatron3d.runtime.heartbeat import COLLECTIVES_FILES
    from megatron3d.runtime.watchdog import innermost_file

    if innermost_file(error.__traceback__) not in COLLECTIVES_FILES or not _LOST.search(str(error)):
        return None
    what = str(error).partition("\n")[0].partition(". This is typically")[0]
    return one_line(what)


def let_rank_0_tell() -> int:
    """Wait on other ranks than 0, before which a launcher stops them if one has ended; return the rank.

    A message of all ranks is printed once that way, also where rank 0 is slow to find it, since they print one after
    another; and a message of a single rank is not lost.
    """
    env = _env_or_default()
    if env.rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(TELL_S + TELL_AFTER_S * env.local_rank)
    return env.rank


def _print_errors(messages: Sequence[str]) -> None:
    """Print on rank 0 immediately, on the others later."""
    rank = let_rank_0_tell()
    prefix = f"[rank {rank}] " if rank > 0 else ""
    for message in messages:
        print(prefix + message, file=sys.stderr, flush=True)


def _env_or_default() -> LauncherEnv:
    """Return the launcher's environment, or that of a single process, of the same rank, if it is invalid."""
    try:
        return launcher_env()
    except UserError:
        return LauncherEnv(rank=whole_number(os.environ.get("RANK", "0")) or 0)
