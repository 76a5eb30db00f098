"""Fact: every launcher's variables give the same placement, and wrong ones give one message each.

A process starts, stops and fails with the documented exit code, and never waits for ranks that will not come.
"""

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
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.errors import UserError
from megatron3d.runtime import process
from megatron3d.runtime.exit_codes import ExitCode
from megatron3d.runtime.launcher_env import LauncherEnv, first_host, read_launcher_env
from tests.support.processes import start

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def slurm(**changes: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "11",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
        "SLURM_JOB_NODELIST": "n[07-08],m1",
        "SLURM_JOB_ID": "31005",
    } | changes


def torchrun(**changes: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, ("3", "4", "1", "2", "host", "29500"), strict=True)) | changes


def test_no_launcher_is_a_single_process() -> None:
    assert read_launcher_env({"PATH": "/bin", "SLURM_NTASKS": "8"}) == LauncherEnv()


def test_torchrun() -> None:
    assert read_launcher_env(torchrun()) == LauncherEnv("torchrun", 3, 4, 1, 2, "host", 29500)


def test_srun() -> None:
    assert read_launcher_env(slurm()) == LauncherEnv("srun", 5, 11, 1, 4, "n07", 16005)


def test_srun_step_is_smaller_than_its_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "m1", "SLURM_STEP_TASKS_PER_NODE": "6"}
    place = read_launcher_env(slurm(**step, SLURM_NODEID="0"))
    assert (place.world_size, place.local_world_size, place.address) == (6, 6, "m1")


def open_mpi(**changes: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "3434", strict=True)} | changes


def test_mpirun() -> None:
    mpich = dict(zip(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "3434", strict=True))
    for environ in (open_mpi(MASTER_PORT="1234"), mpich | {"MASTER_PORT": "1234"}):
        assert read_launcher_env(environ) == LauncherEnv("mpirun", 3, 4, 3, 4, "localhost", 1234)
    ports = {read_launcher_env(open_mpi(PMIX_NAMESPACE=f"prterun-{job}@1")).port for job in range(9)}
    assert len(ports) == 9, "jobs on one machine have different ports"


def test_mpirun_inside_a_slurm_job_wins() -> None:
    assert read_launcher_env(slurm() | open_mpi()).rank == 3
    assert read_launcher_env(slurm() | {"PMI_RANK": "5", "PMI_SIZE": "11"}).launcher == "srun"


def test_torchrun_inside_a_slurm_job_takes_precedence() -> None:
    assert read_launcher_env(slurm() | torchrun()).launcher == "torchrun"


def test_master_address_and_port_can_be_chosen_under_srun() -> None:
    place = read_launcher_env(slurm(MASTER_ADDR="ib0", MASTER_PORT="1234"))
    assert (place.address, place.port) == ("ib0", 1234)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set next to RANK:"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set next to RANK, WORLD_SIZE:"),
        (torchrun(WORLD_SIZE="3"), "rank 3 in a world of 3"),
        (torchrun(WORLD_SIZE="0"), "world size 0"),
        (torchrun(LOCAL_RANK="2"), "local rank 2 of 2 processes"),
        (torchrun(LOCAL_WORLD_SIZE="8"), "8 processes on this machine in a world of 4"),
        (torchrun(WORLD_SIZE="four"), "WORLD_SIZE='four': must be a whole number"),
        (torchrun(RANK="-1"), "RANK='-1': must be a whole number"),
        (torchrun(WORLD_SIZE="9" * 5000), "999...': must be a whole number"),
        (
            open_mpi(OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1"),
            "MASTER_ADDR is not set, but mpirun",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (slurm(SLURM_PROCID="11"), "rank 11 in a world of 11"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is not set"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_NODELIST is not set"),
        (slurm(SLURM_JOB_NODELIST=""), "names no machine"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_launcher_env(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("localhost", "localhost"),
        ("n1,n2", "n1"),
        ("n[1-3,07]", "n1"),
        ("n[007-010],m2", "n007"),
        ("rack[2,4]n[5-6]-ib", "rack2n5-ib"),
        ("n[7]", "n7"),
    ],
)
def test_first_host(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


@given(prefix=st.from_regex(r"[a-z]{1,4}", fullmatch=True), first=st.integers(0, 99), count=st.integers(1, 9))
def test_first_host_of_a_range_keeps_its_zeros(prefix: str, first: int, count: int) -> None:
    assert first_host(f"{prefix}[{first:03d}-{first + count:03d},5],other") == f"{prefix}{first:03d}"


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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (2, 8, 1), (5, 2, 2)])
def test_cores_are_shared_by_the_ranks_of_a_machine(
    cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(process, "num_cores", lambda: cores)
    monkeypatch.setattr(process, "_device", lambda env: torch.device("cpu"))
    monkeypatch.setattr(process, "launcher_env", lambda: LauncherEnv(local_world_size=ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with process.start():
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with process.start():
        assert chosen == [threads]


def test_stop_signals_are_recorded_and_a_later_interrupt_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Ctrl-C delivered by both the terminal and torchrun counts once."""
    before = signal.getsignal(signal.SIGTERM)
    with process.StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
        with process.StopSignal() as stop:
            assert stop.requested is None
            os.kill(os.getpid(), number)
            assert stop.requested == number.name
    with process.StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(process.StopSignal, "REPEAT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_after_a_stop_do_not_change_the_exit_code(tmp_path: Path) -> None:
    """Batch systems repeat SIGTERM, also while the process ends."""
    (rank,) = _launch(
        """
        import atexit, os, signal
        send = lambda: [os.kill(os.getpid(), number) for number in (15, 15, 10, 1, 2)]
        atexit.register(send)
        with process.StopSignal() as stop:
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
    with process.StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested is None


def test_phases_are_timed_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    phases, quiet = process.StartupPhases(printing=True), process.StartupPhases(printing=False)
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
        "import sys\nfrom megatron3d.runtime import process\nfrom megatron3d.errors import UserError\n\n\ndef main():\n"
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is the C library's to manage")
def test_freed_memory_is_reused(tmp_path: Path) -> None:
    """The last 20 of sixty allocations of 64 MiB, each freed before the next, take no memory from the system."""
    ranks = _launch(
        """
        import os, resource

        with process.start(timeout_s=60) as place:
            import torch
            faults = []
            for _ in range(61):
                torch.ones(2**24)
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            print(round((faults[-1] - faults[40]) * resource.getpagesize() / 2**26))
            print(os.environ["TORCH_FR_BUFFER_SIZE"])
        """,
        tmp_path,
    )
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "0\n0\n")] * 2, ranks


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


def test_other_ranks_name_themselves(tmp_path: Path) -> None:
    ranks = _launch('raise UserError("train.lr=-1: must be above 0")', tmp_path)
    assert [rank.returncode for rank in ranks] == [ExitCode.USER_ERROR] * 2
    assert [rank.stderr for rank in ranks] == [
        "train.lr=-1: must be above 0\n",
        "[rank 1] train.lr=-1: must be above 0\n",
    ]


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
