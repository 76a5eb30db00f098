"""Kernels of torch's scaled_dot_product_attention that a run can use and the one it gets, as torch reports them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

NAMES: Mapping[SDPBackend, str] = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "math",
    SDPBackend.OVERRIDEABLE: "the device's own",
}


def describe_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    seq_length: int,
    dropout: float = 0.0,
    packed: str | None = None,
) -> str:
    """Return the line of the start-up report about the attention kernel.

    Args:
        heads: query heads and key/value heads of one rank, and the size of a head.
        dropout: rate of dropout on the attention weights; if it is not 0, training does not use these kernels.
        packed: kernel within documents and windows; None: each query sees all before it.
    """
    num_heads, num_groups, size = heads
    q, k = (
        torch.empty(1, seq_length, n, size, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)
        for n in (num_heads, num_groups)
    )
    groups = "" if num_groups == num_heads else f" ({num_groups} key/value)"
    what = f"{num_heads} heads{groups} of {size} in {str(dtype).removeprefix('torch.')} on each rank"
    line = f"{chosen(q, k)} kernel for {what} (usable: {', '.join(usable(q, k))})"
    if packed is not None:
        line = f"{line}; within documents and windows {packed}"
    if dropout > 0:
        return f"attention: plain matmuls in training, since attention_dropout={dropout:g}; in evaluation {line}"
    return f"attention: {line}"


def chosen(q: Tensor, k: Tensor, mask: Tensor | None = None) -> str:
    """Return the kernel that torch chooses for causal or masked attention of `q` and `k` [B, heads, S, D]."""
    is_grouped = q.shape[1] != k.shape[1]
    backend: int = torch._fused_sdp_choice(q, k, k, mask, is_causal=mask is None, enable_gqa=is_grouped)
    return NAMES[SDPBackend(backend)]


def usable(q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[str, ...]:
    """Return the enabled kernels that support causal or masked attention of `q` and `k` [B, heads, S, D]."""
    flags = torch.backends.cuda
    math = flags.math_sdp_enabled()
    if q.device.type == "cpu":
        able = {SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(), SDPBackend.MATH: math}
    else:
        params = flags.SDPAParams(q, k, k, mask, 0.0, mask is None, q.shape[1] != k.shape[1])
        able = {
            SDPBackend.FLASH_ATTENTION: flags.can_use_flash_attention(params),
            SDPBackend.EFFICIENT_ATTENTION: flags.can_use_efficient_attention(params),
            SDPBackend.CUDNN_ATTENTION: flags.can_use_cudnn_attention(params),
            SDPBackend.MATH: math,
        }
    return tuple(NAMES[backend] for backend, is_able in able.items() if is_able)
