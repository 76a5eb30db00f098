"""Every layout computes the same numbers as one process: losses, gradient norms, gradients and parameters in float64.

The layouts come from the registry of modes, so that a new mode is covered when it is entered there.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.comm import ProcessComm
from megatron3d.config.derive import architecture, make_mesh, tensor_mode, vocab_multiple
from megatron3d.config.schema import Config
from megatron3d.model.gpt import axis_sets
from megatron3d.modes import MODES
from megatron3d.verify import differences, trace
from tests.pool import Pool

VOCAB_SIZE = 61
TOLERANCE = 1e-10
NUM_STEPS = 3


def run_trace(rank: int, world_size: int, values: dict[str, Any]) -> Any:
    config = Config.model_validate(values, strict=False)
    mesh = make_mesh(config.parallel, world_size, rank)
    mode = tensor_mode(config.parallel)
    arch = architecture(config.model, VOCAB_SIZE, vocab_multiple(mode))
    return trace(config, VOCAB_SIZE, ProcessComm(mesh, axis_sets(arch, mode, mesh)), NUM_STEPS)


GPT2 = {"family": "gpt2", "num_layers": 2, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8}
CASE = {
    "model": {**GPT2, "make_vocab_size_divisible_by": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "train": {
        "micro_batch_size": 4,
        "global_batch_size": 16,
        "precision": "fp64",
        "loss_chunk_tokens": 12,
        "bucket_mb": 0.01,
    },
    "optimizer": {"lr": 1e-2, "clip_grad": 0.5, "lr_warmup_iters": 1},
}


@pytest.mark.parametrize("mode,form", [(m, f) for m, e in MODES.items() for f in e.forms])
def test_one(pool: Pool, mode: str, form: str) -> None:
    ref = run_trace(0, 1, CASE)
    par = {
        "tensor_parallel_mode": mode,
        "tensor_parallel_form": form,
        "tensor_model_parallel_size": 8 if mode != "2d" else 4,
    }
    got = pool.run(run_trace, 8, {**CASE, "parallel": par})[0]
    diff = list(differences(ref, got, TOLERANCE))
    assert not diff, "\n".join(diff[:5])
