"""Fact: a process starts, stops and fails with the documented exit code, and never waits for absent ranks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.launcher_env import LauncherEnv
from megatron3d.runtime.program import StartupPhases, StopSignal
from tests.support.processes import start
from tests.support.triton_process import needs_triton

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_single_process_has_a_device_and_no_process_group() -> None:
    threads = torch.get_num_threads()
    try:
        with process.start() as place:
            assert (place.rank, place.world_size, place.local_rank) == (0, 1, 0)
            assert (place.device.type == "cpu") != torch.accelerator.is_available()
            assert not torch.distributed.is_initialized()
    finally:
        torch.set_num_threads(threads)


def test_ranks_share_gpus_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that took the GPU of its local rank, or NCCL, would fail with more ranks than GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ranks = [LauncherEnv("torchrun", rank, 5, rank, 5) for rank in range(5)]
    assert [process._device(env, shares_gpus=True).index for env in ranks] == [0, 1, 0, 1, 0]
    assert [process._device(env).index for env in ranks[:2]] == [0, 1]
    with pytest.raises(UserError, match=r"5 processes on this machine, but 2 GPU\(s\): start at most 2"):
        process._device(ranks[2])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (2, 8, 1), (5, 2, 2)])
def test_cores_are_shared_by_the_ranks_of_a_machine(
    cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(process, "num_cores", lambda: cores)
    monkeypatch.setattr(process, "_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(process, "launcher_env", lambda: LauncherEnv(local_world_size=ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with process.start():
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with process.start():
        assert chosen == [threads]


def test_stop_signals_are_recorded_and_a_later_interrupt_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Ctrl-C delivered by both the terminal and torchrun counts once."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
        with StopSignal() as stop:
            assert stop.requested is None
            os.kill(os.getpid(), number)
            assert stop.requested == number.name
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(StopSignal, "REPEAT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_repetition_within_the_handler_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The terminal's Ctrl-C and the launcher's may come together."""
    names = signal.Signals

    def repeated(number: int) -> signal.Signals:
        monkeypatch.undo()
        os.kill(os.getpid(), number)
        return names(number)

    with StopSignal(tells=True) as stop:
        monkeypatch.setattr(signal, "Signals", repeated)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"
    told = "> SIGINT: stopping after this step or the next, and saving; once more: ends at once, without saving\n"
    assert capfd.readouterr().err == told


def test_signals_that_the_parent_blocked_stop_a_run() -> None:
    """Supervisors block signals for threads of their own, and a process that they start inherits it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.requested == "SIGUSR1"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@needs_triton
def test_a_signal_that_a_compiler_took_stops_a_run(tmp_path: Path) -> None:
    """LLVM handles SIGUSR1 in a process that has compiled a Triton kernel, and drops it."""
    (rank,) = _launch(
        f"""
        import os, signal
        os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "cache")!r}
        from tests.support.fused_adamw import compiled
        with StopSignal() as stop:
            compiled()
            os.kill(os.getpid(), signal.SIGUSR1)
            print(stop.is_requested())
            os.kill(os.getpid(), signal.SIGUSR1)
            print(stop.is_requested())
        """,
        tmp_path,
        world_size=1,
    )
    assert (rank.stdout, rank.stderr) == ("False\nTrue\n", "")


def test_signals_after_a_stop_do_not_change_the_exit_code(tmp_path: Path) -> None:
    """Batch systems repeat SIGTERM, also while the process ends."""
    (rank,) = _launch(
        """
        import atexit, os, signal
        send = lambda: [os.kill(os.getpid(), number) for number in (15, 15, 10, 1, 2)]
        atexit.register(send)
        with StopSignal() as stop:
            send()
        send()
        return 3
        """,
        tmp_path,
        world_size=1,
    )
    assert (rank.returncode, rank.stderr) == (ExitCode.STOPPED, "")


def test_nohup_keeps_a_run_from_stopping_with_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested is None


def test_phases_are_timed_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    phases, quiet = StartupPhases(printing=True), StartupPhases(printing=False)
    with phases("model"), quiet("data"):
        pass
    assert [name for name, _ in phases.durations + quiet.durations] == ["model", "data"]
    assert phases.total_s >= quiet.total_s >= 0
    assert capsys.readouterr().out == f"> model ({phases.total_s:.2f} s)\n"


@pytest.mark.usefixtures("alone")
def test_exit_codes_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise UserError("data.data_path=x: is absent", "train.lr=-1: must be above 0")

    def interrupt() -> int:
        raise KeyboardInterrupt

    assert process.run_program(lambda: 3) == ExitCode.STOPPED
    assert process.run_program(refuse) == ExitCode.USER_ERROR
    assert process.run_program(interrupt) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "data.data_path=x: is absent\ntrain.lr=-1: must be above 0\ninterrupted\n"
    with pytest.raises(ZeroDivisionError):
        process.run_program(lambda: 1 // 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ExitCode.USER_ERROR), (errno.EACCES, ExitCode.USER_ERROR), (errno.EIO, ExitCode.CRASH)],
)
def test_a_fault_of_the_machine_is_not_the_users(
    number: int, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that ends with code 2 is not requeued."""

    def fail() -> int:
        raise OSError(number, os.strerror(number), "run/iter_0000010")

    assert process.run_program(fail) == code
    assert capsys.readouterr().err == f"run/iter_0000010: {os.strerror(number)}\n"


def _launch(body: str, folder: Path, world_size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run `body`, the body of a program's main, on every rank, without a launcher that would kill stragglers."""
    program = folder / "program.py"
    program.write_text(
        "import sys\nfrom megatron3d.runtime import process\nfrom megatron3d.runtime.program import StopSignal\n"
        "from megatron3d.errors import UserError\n\n\ndef main():\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\n    return 0\n\n\nsys.exit(process.run_program(main))\n"
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = str(Path(process.__file__).parents[2])
    running = [
        start(
            [sys.executable, str(program)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    outputs = [child.communicate(timeout=60) for child in running]
    return [
        subprocess.CompletedProcess(child.args, child.returncode, *output)
        for child, output in zip(running, outputs, strict=True)
    ]


@pytest.mark.slow
def test_ranks_start_communicate_and_end(tmp_path: Path) -> None:
    ranks = _launch(
        """
        assert "torch" not in sys.modules, "torch is imported before start"
        with process.start(timeout_s=60) as place:
            import torch
            total = torch.tensor([place.rank + 1.0])
            torch.distributed.all_reduce(total)
            print(place.rank, place.world_size, total.item())
        """,
        tmp_path,
    )
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "0 2 3.0\n"), (0, "1 2 3.0\n")], ranks


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is the C library's to manage")
def test_freed_memory_is_reused(tmp_path: Path) -> None:
    """Sixty allocations of 64 MiB, each freed before the next: at most two of the last 20 take new memory.

    Without the settings each of them does.  A small allocation of another thread can split a freed one: the next then
    comes from the system.
    """
    ranks = _launch(
        """
        import os, resource

        with process.start(timeout_s=60) as place:
            import torch
            faults = []
            for _ in range(61):
                torch.ones(2**24)
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            print(round((faults[-1] - faults[40]) * resource.getpagesize() / 2**26) <= 2)
            print(os.environ["TORCH_FR_BUFFER_SIZE"])
        """,
        tmp_path,
    )
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "True\n0\n")] * 2, ranks


@pytest.mark.slow
def test_a_crash_ends_the_process_although_collectives_are_pending(tmp_path: Path) -> None:
    ranks = _launch(
        """
        with process.start(timeout_s=120) as place:
            import torch
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            pending = torch.distributed.all_reduce(ones, async_op=True) if place.rank == 0 else None
            if place.rank == 0:
                raise RuntimeError("what went wrong")
            torch.distributed.barrier()
        """,
        tmp_path,
    )
    assert [rank.returncode for rank in ranks] == [ExitCode.CRASH] * 2
    assert "what went wrong" in ranks[0].stderr
    assert "[rank 1] Traceback" in ranks[1].stderr


@pytest.mark.slow
def test_a_rank_that_outlives_rank_0_prints_no_stacks(tmp_path: Path) -> None:
    """Bug that this finds: torch prints a C++ stack for each call of the store, which ends with rank 0."""
    ranks = _launch(
        """
        with process.start(timeout_s=120) as place:
            import os, time, torch
            from megatron3d.comm.process_comm import ProcessComm
            from megatron3d.parallel.mesh import Mesh
            comm = ProcessComm(Mesh((("x", 2),), place.rank), (("x",),))
            comm.barrier()
            if place.rank == 0:
                os.kill(os.getpid(), 9)
            time.sleep(1.5)
            comm.barrier()
        """,
        tmp_path,
    )
    assert [rank.returncode for rank in ranks] == [-9, ExitCode.CRASH]
    first, second = ranks[1].stderr.splitlines()
    assert first.startswith("> watchdog: rank 1: ") and "rank 0's process, which keeps the heartbeats" in first
    assert second.startswith("[rank 1] ends, since another rank has ended: ") and "typically" not in second


LATE_READER = """
    with process.start(timeout_s=60) as place:
        import time, torch
        from megatron3d.comm.objects import StoreObjects, run_on_all_ranks, store_objects
        from megatron3d.parallel.mesh import Mesh
        comm = store_objects(Mesh((("x", 2),), place.rank))
        take = StoreObjects._take
        def late(self, key):
            time.sleep(1)
            return take(self, key)
        StoreObjects._take = late if place.rank == 1 else take
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "code"),
    [("comm.broadcast_object(7)", 0), ("run_on_all_ranks(comm, lambda: (_ for _ in ()).throw(UserError('no')))", 2)],
)
def test_rank_0_stays_until_the_others_have_read_its_store(tmp_path: Path, last: str, code: int) -> None:
    """Bug that this finds: a run that is done exits 1, since the store ends with rank 0 before another rank reads."""
    ranks = _launch(f"{textwrap.dedent(LATE_READER)}    {last}\n", tmp_path)
    assert [rank.returncode for rank in ranks] == [code] * 2, ranks
    assert not any("Traceback" in rank.stderr for rank in ranks)


@pytest.mark.slow
def test_rank_0_does_not_wait_for_a_rank_that_has_died(tmp_path: Path) -> None:
    ranks = _launch(
        """
        process.LEAVE_S = 1.0
        with process.start(timeout_s=60) as place:
            import os, torch
            torch.distributed.barrier()
            if place.rank == 1:
                os._exit(7)
        """,
        tmp_path,
    )
    assert [rank.returncode for rank in ranks] == [0, 7], ranks


def test_other_ranks_name_themselves(tmp_path: Path) -> None:
    ranks = _launch('raise UserError("train.lr=-1: must be above 0")', tmp_path)
    assert [rank.returncode for rank in ranks] == [ExitCode.USER_ERROR] * 2
    assert [rank.stderr for rank in ranks] == [
        "train.lr=-1: must be above 0\n",
        "[rank 1] train.lr=-1: must be above 0\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("PORT", "99999", "ports are 1 to 65535"), ("ADDR", "no-such-host.invalid", "no machine of this name is known")],
)
def test_a_wrong_rendezvous_is_one_message(tmp_path: Path, name: str, value: str, words: str) -> None:
    """Bug that this finds: 45 lines of C++ for a name that is misspelled."""
    body = f"""
        import os
        os.environ["MASTER_{name}"] = "{value}"
        process.ADDRESS_S = 0.5
        with process.start(timeout_s=60):
            pass
    """
    ranks = _launch(body, tmp_path)
    assert [rank.returncode for rank in ranks] == [ExitCode.USER_ERROR] * 2, ranks
    for prefix, rank in zip(("", "[rank 1] "), ranks, strict=True):
        (line,) = rank.stderr.splitlines()
        assert line.startswith(f"{prefix}MASTER_{name}={value}: ") and words in line


@pytest.mark.slow
def test_absent_ranks_are_reported(tmp_path: Path) -> None:
    ranks = _launch(
        """
        if process.launcher_env().rank == 0:
            with process.start(timeout_s=1):
                pass
        """,
        tmp_path,
    )
    assert ranks[0].returncode == ExitCode.USER_ERROR, ranks[0].stderr
    assert "rank 0 of 2: rendezvous at localhost:" in ranks[0].stderr
