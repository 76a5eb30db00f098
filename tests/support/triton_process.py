"""Checks of Triton kernels in a process of their own, since Triton decides at its import whether it interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron3d.runtime.machine import has_triton

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(not has_triton(), reason="the triton package is not installed")


def check(module: str, name: str, folder: Path, **env: str) -> dict[str, Any]:
    """Return what `python -m tests.support.MODULE NAME` prints; compiled kernels go to `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assemble(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], options: Any, sm: int) -> str:
    """Return the PTX of a kernel for a compute capability, 90 for Hopper; its machine code is made as well."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    built = compile_kernel(source, target=GPUTarget("cuda", sm, 32), options=options)
    assert built.asm["cubin"], "no machine code"
    return str(built.asm["ptx"])
