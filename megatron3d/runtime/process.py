"""From a started process to a rank with a device, and back: the only place that reads the environment, installs signal
handlers or starts torch.distributed.

torch is imported by `start`, not by this file: checking a configuration and refusing a bad one work without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from megatron3d.errors import UserError
from megatron3d.runtime.exit_codes import ExitCode
from megatron3d.runtime.host_allocator import keep_freed_memory
from megatron3d.runtime.launcher_env import Allocation, Placement, read_allocation, read_environment

if TYPE_CHECKING:
    import torch

    from megatron3d.runtime.watchdog import Watchdog

T = TypeVar("T")
# What torch waits for longer than the watchdog, which can say more.
GRACE_S = 30.0


@dataclass(frozen=True)
class Runtime:
    """This process's place in the world and the device that it computes on."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    watchdog: Watchdog | None = None


def placement() -> Placement:
    """What the launcher says about this process."""
    return read_environment(os.environ)


def allocation() -> Allocation:
    """What SLURM says of the job that this process belongs to."""
    return read_allocation(os.environ)


@contextlib.contextmanager
def start(timeout_s: float = 600.0, on_cpu: bool = False) -> Iterator[Runtime]:
    """Choose the device, meet the other ranks, and part from them at the end.

    Args:
        timeout_s: how long a rank may be without any progress, or wait for the others here.
        on_cpu: leave an accelerator alone, for what must run with as many processes as one likes.
    """
    import torch

    place = placement()
    device = torch.device("cpu") if on_cpu else _device(place)
    if device.type == "cpu":
        keep_freed_memory()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    if place.world_size == 1:
        yield Runtime(0, 1, place.local_rank, device)
        return
    with _process_group(place, device, timeout_s), _watchdog(place, timeout_s) as watchdog:
        yield Runtime(place.rank, place.world_size, place.local_rank, device, watchdog)


def _watchdog(place: Placement, timeout_s: float) -> Watchdog:
    """Ends this process when it has made no progress for so long; the launcher then ends the others."""
    from megatron3d.runtime.status_store import TcpStatusStore
    from megatron3d.runtime.watchdog import Watchdog

    store = TcpStatusStore(place.address, place.port, _attempt())
    return Watchdog(store, place.rank, place.world_size, timeout_s, _leave_at_once)


def _attempt() -> int:
    """How often torchrun has started these ranks before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _leave_at_once() -> None:
    """The ordinary way out would wait for collectives that no other rank will join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ExitCode.CRASH)


def launch(num_ranks: int, rank: Callable[..., T], *args: object) -> T:
    """Start `num_ranks` processes of `rank(*args)` on this machine with torchrun's own launcher; rank 0's result."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id=rank.__name__,
    )
    results: dict[int, T] = elastic_launch(config, rank)(*args)
    return results[0]


def _device(place: Placement) -> torch.device:
    """The GPU of my local rank, or the only one that srun left visible; the CPU where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    bound_by_launcher = visible == 1 and place.launcher == "srun"
    index = 0 if bound_by_launcher else place.local_rank
    if index >= visible:
        raise UserError(
            f"{place.local_world_size} processes on this machine, but {visible} GPU(s): start at most {visible}, "
            f"or compute on the CPU with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _process_group(place: Placement, device: torch.device, timeout_s: float) -> Iterator[None]:
    import torch.distributed as dist

    # No device_id: with one, torch splits a new group's communicator off the world's, for which every rank of the world
    # would have to make every group, also those of other ranks' links.
    attempt = _attempt()
    has_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.world_size,
            is_master=place.rank == 0 and not has_server,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            # torchrun's own store outlives the ranks that it starts again, with addresses that nobody listens at.
            store=dist.PrefixStore(f"attempt {attempt}", store),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s + GRACE_S),
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {place.rank} of {place.world_size} did not meet the others at {place.address}:{place.port} within "
            f"{timeout_s:.0f} s ({reason}): check that all were started and that the port is free and reachable"
        ) from error
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def pretend(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a world whose others do not exist: calls have their shapes, not their values."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class StopSignal:
    """While entered, SIGINT, SIGTERM and SIGUSR1 ask for a stop instead of killing; SIGINT again interrupts.

    One Ctrl-C may arrive twice, from the terminal and from torchrun, so a repeat counts only after `REPEAT_S` seconds.
    """

    REPEAT_S = 1.0

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._note) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        repeated = self.requested is not None and time.monotonic() - self._since_s > self.REPEAT_S
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested, self._since_s = signal.Signals(number).name, time.monotonic()


class StartupPhases:
    """Names and durations of the startup phases, each printed when it ends."""

    def __init__(self, printing: bool) -> None:
        self.durations: list[tuple[str, float]] = []
        self._printing = printing

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body of a `with` as the phase `name`."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.durations.append((name, seconds))
        if self._printing:
            print(f"> {name} ({seconds:.2f} s)", flush=True)

    @property
    def total_s(self) -> float:
        """Seconds of all phases together."""
        return sum(seconds for _, seconds in self.durations)


def run_program(main: Callable[[], int]) -> int:
    """The exit code of `main`; what a user did wrong becomes messages on stderr and code 2.

    In a world of several ranks a failure ends the process here and now: the ordinary way out would wait for
    collectives that no other rank will join.
    """
    try:
        return main()
    except UserError as error:
        _tell(error.problems)
        code = ExitCode.USER_ERROR
    except KeyboardInterrupt:
        _tell(("interrupted",))
        code = ExitCode.INTERRUPTED
    except Exception:
        if _place_or_alone().world_size == 1:
            raise
        _tell((traceback.format_exc(),))
        code = ExitCode.CRASH
    if _place_or_alone().world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _tell(messages: Sequence[str], grace_s: float = 1.0) -> None:
    """Rank 0 speaks at once.  The others wait, since a launcher that sees rank 0 end stops them within that time:
    what all ranks have to say is said once, and what only one has to say is not lost."""
    place = _place_or_alone()
    if place.rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(grace_s)
    prefix = f"[rank {place.rank}] " if place.rank > 0 else ""
    for message in messages:
        print(prefix + message, file=sys.stderr, flush=True)


def _place_or_alone() -> Placement:
    """Where this process is, also while the environment itself is what is wrong."""
    try:
        return placement()
    except UserError:
        return Placement()
