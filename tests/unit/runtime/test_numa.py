"""Fact: a rank runs on the CPUs next to its GPU that its launcher has left, or says why not."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron3d.runtime import machine as numa
from megatron3d.runtime import process
from megatron3d.runtime.launcher_env import LauncherEnv
from megatron3d.runtime.machine import bind_to_gpu, cpus_of, node_of, num_threads

GPU, ORPHAN = "0000:3b:00.0", "0000:5e:00.0"


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Return a machine of two NUMA nodes with hyperthreads, and with a GPU on node 1 and one on none."""
    for address, node in ((GPU, "1"), (ORPHAN, "-1")):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    for number, cpus in enumerate(("0-7,16-23", "8-15,24-30,31")):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(f"{cpus}\n")
    return tmp_path


def bound(address: str, allowed: Collection[int], sys: Path) -> tuple[str, dict[int, list[int]]]:
    """Return what the binding says, and the CPUs of each thread that it binds."""
    calls: dict[int, list[int]] = {}
    return bind_to_gpu(address, allowed, sys, lambda thread, cpus: calls.update({thread: list(cpus)})), calls


def test_the_node_of_a_gpu_and_its_cpus(sys: Path) -> None:
    assert node_of(GPU.upper(), sys) == 1 and node_of(ORPHAN, sys) is None and node_of("0000:99:00.0", sys) is None
    assert cpus_of(1, sys) == (*range(8, 16), *range(24, 32)) and cpus_of(5, sys) == ()


def test_every_thread_is_bound_to_the_node_of_the_gpu(sys: Path) -> None:
    """Bug that this finds: only the calling thread is bound, and threads that CUDA has started stay where they are."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    text, calls = bound(GPU, range(32), sys)
    end.set()
    assert text == f"16 of 32 CPUs, on NUMA node 1 of GPU {GPU}"
    assert {os.getpid(), other.native_id} <= calls.keys()
    assert set(map(tuple, calls.values())) == {(*range(8, 16), *range(24, 32))}


def test_a_binding_of_the_launcher_is_never_widened(sys: Path) -> None:
    """Bug that this finds: a rank leaves the CPUs that numactl or a batch system gave it."""
    text, calls = bound(GPU, range(4, 14), sys)
    assert text.startswith("6 of 10 CPUs") and set(map(tuple, calls.values())) == {(8, 9, 10, 11, 12, 13)}
    text, calls = bound(GPU, [8, 9], sys)
    assert text.startswith("2 of 2 CPUs") and set(map(tuple, calls.values())) == {(8, 9)}


@pytest.mark.parametrize(
    ("address", "allowed", "reason"),
    [
        (GPU, range(8), f"not bound: 0 of 8 CPUs of this rank are on NUMA node 1 of GPU {GPU}"),
        (GPU, range(11), f"not bound: 3 of 11 CPUs of this rank are on NUMA node 1 of GPU {GPU}"),
        (ORPHAN, range(32), f"not bound: the system names no NUMA node of GPU {ORPHAN}"),
    ],
)
def test_a_rank_that_would_be_left_with_few_cpus_is_not_bound(
    address: str, allowed: range, reason: str, sys: Path
) -> None:
    assert bound(address, allowed, sys) == (reason, {})


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(192, 8, 8), (64, 8, 4), (16, 1, 8), (8, 8, 1)])
def test_threads_next_to_a_gpu(cpus: int, ranks: int, threads: int) -> None:
    assert num_threads(cpus, ranks) == threads


def test_a_process_on_a_gpu_names_its_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: the address of the GPU is written in decimal, so that no device has it."""
    asked: list[str] = []
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(process, "_device", lambda *_: torch.device("meta"))
    monkeypatch.setattr(process, "launcher_env", lambda: LauncherEnv(local_world_size=2))
    monkeypatch.setattr(process, "num_cores", lambda: 12)
    monkeypatch.setattr(numa, "bind_to_gpu", lambda address, allowed: asked.append(address) or "all of them")
    with mock.patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        with process.start() as here:
            assert here.settings["CPUs of rank 0"] == "all of them" and "threads of CPU operators" in here.settings
    assert (asked, chosen) == ([GPU], [3])
