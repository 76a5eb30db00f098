"""Fact: without a GPU the scripts install the newest CPU build of torch that pip finds, and no CUDA build unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = f"set -euo pipefail; source {ROOT}/scripts/common.sh; install_cpu_torch"
REQUIREMENT = 'install_requires=["torch>=2.11,<2.16"]'


def write_wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """Write an empty package that requires others."""
    stem = f"{name.replace('-', '_')}-{version}"
    required = [f"Requires-Dist: {need}" for need in needs]
    with ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *required, ""])
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def install(folder: Path, cuda: list[str], cpu: list[str], **environ: str) -> tuple[int, str, list[str]]:
    """Run the script where pip finds these builds of torch; return its exit code, its errors, and what it installed."""
    wheels, modules = folder / "wheels", folder / "modules"
    wheels.mkdir()
    modules.mkdir()
    write_wheel(wheels, "nvidia-cublas", "1.0")
    for version in cuda:
        write_wheel(wheels, "torch", version, ("nvidia-cublas",))
    for version in cpu:
        write_wheel(wheels, "torch", version)
    (folder / "setup.py").write_text(REQUIREMENT, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    # To import pip here would take setuptools' distutils from all later tests of this process.
    (modules / "pip").symlink_to(str(distribution("pip").locate_file("pip")))
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MEGATRON3D_"))}
    done = subprocess.run(
        ["bash", "-c", SCRIPT],
        cwd=folder,
        env=kept | ours | {"PYTHONPATH": str(modules)} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    names = sorted(path.name for path in folder.glob(".venv/lib/*/site-packages/*.dist-info"))
    return done.returncode, done.stderr, [name.removesuffix(".dist-info") for name in names]


@pytest.mark.parametrize(
    ("cuda", "cpu", "expected"),
    [
        ([], ["2.15.0", "2.13.0", "2.16.0"], "2.15.0"),
        (["2.15.0", "2.14.1", "2.14.0", "2.12.0"], ["2.13.0", "2.11.0"], "2.13.0"),
    ],
)
def test_the_newest_cpu_build_is_installed(cuda: list[str], cpu: list[str], expected: str, tmp_path: Path) -> None:
    assert install(tmp_path, cuda, cpu)[::2] == (0, [f"torch-{expected}"])


def test_where_there_are_cuda_builds_alone_none_is_installed_unasked(tmp_path: Path) -> None:
    code, errors, installed = install(tmp_path, ["2.15.0", "2.14.0"], ["2.10.0"])
    assert code == 2 and not installed
    assert "error: found no CPU build of torch>=2.11,<2.16, neither in pip's own sources" in errors


def test_a_cuda_build_that_is_allowed_is_left_to_the_installation(tmp_path: Path) -> None:
    code, _, installed = install(tmp_path, ["2.15.0"], [], MEGATRON3D_ALLOW_CUDA_BUILD="1")
    assert code == 0 and not installed
