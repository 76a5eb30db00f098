"""Fact: every launcher's variables give the same placement, and wrong ones give one message each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.errors import UserError
from megatron3d.runtime.launcher_env import LauncherEnv, first_host, read_launcher_env


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


def test_steps_of_one_allocation_have_different_ports() -> None:
    """Several sruns of one job may run at the same time; neighbouring jobs share nodes, too."""
    ports = {
        read_launcher_env(slurm(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))).port
        for job in range(4000, 4100)
        for step in range(9)
    }
    assert len(ports) == 900 and all(1024 < port < 32768 for port in ports)


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
