"""Double of torch.cuda.set_sync_debug_mode("error"): what reads a value of a tensor, and so waits for a device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result, or its size, is a value that a GPU has to have computed.
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount")


class NoHostReads(TorchDispatchMode):
    """While entered, an operator that reads a value on the host is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name.removeprefix("aten::") not in READS, f"{func} waits for the device"
        return func(*args, **kwargs or {})
