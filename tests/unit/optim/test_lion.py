"""Fact: Lion's update is its authors' where the momentum is no rounding, and small where it is."""

from __future__ import annotations

import pytest
import torch

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim.adamw import ParamGroup
from megatron3d.optim.lion import update_with_lion


@pytest.mark.parametrize("size", [10, 2**18 + 3])
def test_two_steps_are_the_authors(size: int) -> None:
    config, lr, decay = OptimizerConfig(optimizer="lion", lion_beta1=0.9, lion_beta2=0.95), 0.1, 0.3
    generator = torch.Generator().manual_seed(0)
    w, *gradients = (torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(3))
    m, main, momentum = torch.zeros_like(w), w.clone(), torch.zeros_like(w)
    for g in gradients:
        w = w - lr * ((0.9 * m + 0.1 * g).sign() + decay * w)
        m = 0.95 * m + 0.05 * g
        group = ParamGroup(decay, [main], [g.clone()], ([momentum],))
        update_with_lion(group, config, lr, torch.tensor(0.0), torch.tensor(0.0))
    torch.testing.assert_close(main, w, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(momentum, m, rtol=1e-12, atol=1e-12)


def test_the_sign_of_rounding_moves_nothing() -> None:
    config = OptimizerConfig(optimizer="lion", lion_eps=1e-6)
    main, momentum = torch.zeros(2), torch.zeros(2)
    group = ParamGroup(0.0, [main], [torch.tensor([1e-18, -1.0])], ([momentum],))
    update_with_lion(group, config, 0.1, torch.tensor(0.0), torch.tensor(0.0))
    assert 0 > main[0] > -1e-12 and main[1] == pytest.approx(0.1)
