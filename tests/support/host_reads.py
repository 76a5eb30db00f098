"""Double of torch.cuda.set_sync_debug_mode("error"): what reads a value of a tensor, and so waits for a device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The operator by which a tensor is made of Python's numbers, an index of a list included: on a GPU by a copy, for which
# the host waits.  A number alone is no copy where it is written to a part of a tensor.
MADE = "lift_fresh"
# Operators whose result, or its size, is a value that a GPU has to have computed.
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount")


class NoHostReads(TorchDispatchMode):
    """While entered, an operator that reads a value on the host is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [
            x for arg in args if isinstance(arg, (list, tuple)) for x in arg if getattr(x, "dtype", None) == torch.bool
        ]
        is_sized_by_values = "index" in func._schema.name and masks
        is_made = func._schema.name.removeprefix("aten::") == MADE and args[0].dim() > 0
        is_read = func._schema.name.removeprefix("aten::") in READS
        assert not is_read and not is_sized_by_values and not is_made, f"{func} waits for the device"
        return func(*args, **kwargs or {})
