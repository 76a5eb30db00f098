"""Settings of torch and cuBLAS by which the same run gives the same bits each time, and by which GEMMs sum in fp32."""

from __future__ import annotations

from collections.abc import MutableMapping

from megatron3d.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# The two with which cuBLAS gives the same bits in every run; the first is the larger and faster one.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


def set_up_determinism(environ: MutableMapping[str, str], is_deterministic: bool) -> dict[str, str]:
    """Choose deterministic kernels before CUDA starts, or not; return the setting for the startup report.

    With them torch raises where an operation has none.  Raises UserError where the user has set a cuBLAS workspace that
    contradicts `train.deterministic_mode`.
    """
    import torch

    torch.use_deterministic_algorithms(is_deterministic)
    torch._C._set_deterministic_fill_uninitialized_memory(not is_deterministic)  # no result depends on it
    if not is_deterministic:
        return {"deterministic": "no (train.deterministic_mode=false)"}
    given = environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if given not in DETERMINISTIC_WORKSPACES:
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise UserError(
            f"train.deterministic_mode=true: {WORKSPACE}={given} lets cuBLAS choose among kernels; unset it, or use "
            f"{allowed}"
        )
    return {"deterministic": f"yes ({WORKSPACE}={given})"}


def sum_gemms_in_fp32() -> None:
    """Let GEMMs in bf16 and fp16 add partial sums (split-K) in fp32, which torch does not by default."""
    import torch

    for dtype in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)
