"""The device that the tests of this folder compare with the CPU in float64."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the GPU, or the CPU with --on-cpu; skip the test where there is neither."""
    if request.config.getoption("--on-cpu"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        pytest.skip("there is no GPU; --on-cpu compares the CPU with itself")
    return torch.device(str(torch.accelerator.current_accelerator()), 0)
