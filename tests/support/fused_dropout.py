"""Compare the Triton kernel of dropout masks with torch's operations, and compile it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron3d.ops import triton_kernels
from megatron3d.ops.dropout import hash_inputs, mask_of
from tests.support.triton_process import assemble


def interpret() -> dict[str, int]:
    """Return the number of elements that differ, by shape and rate."""
    triton_kernels.MASK_BLOCK = 64
    found = {}
    for num_rows, num_columns, key in ((3, 100, 2**62 + 7), (20, 64, -5), (1, 1, 0), (0, 4, 1)):
        for rate in (0.0, 0.1, 0.9):
            inputs = hash_inputs(key, torch.arange(num_rows) + 2**33, torch.arange(num_columns), rate)
            keep = torch.empty(num_rows, num_columns, dtype=torch.bool)
            triton_kernels.write_mask(*inputs, keep)
            found[f"{num_rows} x {num_columns}, rate {rate}"] = int((keep != mask_of(*inputs)).sum())
    return found


def compiled() -> dict[str, str]:
    """Return the PTX by compute capability."""
    signature = {"rows": "*i64", "columns": "*i64", "keep": "*i8", "least": "i64", "num_columns": "i32"}
    kernel, constants = triton_kernels.mask_kernel, {"BLOCK": triton_kernels.MASK_BLOCK}
    return {str(sm): assemble(kernel, signature, constants, triton_kernels.MASK_OPTIONS, sm) for sm in (80, 90)}


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {"interpret": interpret, "assemble": compiled}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
