"""Fact: the files that the Dockerfile copies suffice to check and start a run, and its extras exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_image_copies_every_needed_file(tmp_path: Path) -> None:
    """All Python files of the image parse, and a run and its job are checked, from the copied files alone."""
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        *sources, target = line.split()
        for source in sources:
            there = tmp_path / (f"{target}{source}" if target.endswith("/") else target)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, there)
    asked = ["--config", "configs/gpt3-175b.yaml"]
    for program in (
        ["-m", "compileall", "-q", "megatron3d", "tools", "pretrain_gpt.py"],
        ["pretrain_gpt.py", *asked, "--check", "--elsewhere", "--world-size", "1024"],
        ["tools/make_slurm.py", *asked, "--cluster", "selene", "--nodes", "128", "--dry-run"],
        ["-c", f"import megatron3d; assert megatron3d.__file__.startswith({str(tmp_path)!r})"],
    ):
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *program], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_packages_of_the_image_exist() -> None:
    (extras,) = re.findall(r'pip install .*"\.\[(.*)\]"', DOCKERFILE)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert [name for name in extras.split(",") if f'"{name}": ' not in setup] == []
    ((low, high),) = re.findall(r"python_requires=\">=(3\.\d+)(?:,<(3\.\d+))?\"", setup)
    (image,) = re.findall(r"^FROM python:3\.(\d+)-slim$", DOCKERFILE, re.M)
    assert int(low.partition(".")[2]) <= int(image) and (not high or int(image) < int(high.partition(".")[2]))


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("a C compiler, without which Triton builds no kernel", "build-essential"),
        ("libibverbs.so.1, without which NCCL falls back to TCP", "libibverbs1"),
        ("drivers of InfiniBand and RoCE cards for libibverbs", "ibverbs-providers"),
        ("librdmacm.so.1, which network plugins of NCCL load", "librdmacm1"),
        ("settings of RDMA devices", "rdma-core"),
        ("numactl, for the binding of processes by hand", "numactl"),
    ],
)
def test_the_image_has_what_torch_and_nccl_load_at_run_time(library: str, package: str) -> None:
    """Bug that this finds: a package lost from the image, whose absence costs speed only, and no error says so."""
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends \\\n(.*?) \\\n", DOCKERFILE, re.S)
    assert package in installed.split(), f"{package}: {library}"
