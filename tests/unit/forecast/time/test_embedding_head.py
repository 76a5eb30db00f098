"""Fact: the loss is predicted with the bytes that its kernels move per logit, and with the chunks that it has.

The bug that this finds: a constant of an earlier version of the loss, or GEMMs over more tokens than a chunk has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import ITEMSIZES
from megatron3d.forecast.time.hardware import Network
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.step import ends_times, load_machine
from megatron3d.forecast.time.tasks import accesses_of
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operations import head_operations
from megatron3d.model.spec import NO_RECOMPUTE
from megatron3d.ops.cross_entropy import LMHead, VocabShard, cross_entropy_
from megatron3d.ops.plan import WHOLE_LOSS
from megatron3d.parallel.mesh import Mesh
from tests.support.tiny_run import ROOT

TOKENS, VOCAB = 16, 64
# They touch one number of each row.
SPARSE = ("gather", "scatter_add_")


class LogitTraffic(TorchDispatchMode):
    """Counts the bytes of tensors of the logits' size that operations read or write."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in SPARSE:
            moved = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.num_bytes += sum(x.nbytes for x in moved if x.numel() == TOKENS * VOCAB)
        return out


def machine_of(precision: str, on_gpu: bool) -> Machine:
    machine = load_machine("dgx_h200", precision, 8)
    cluster = machine.network.cluster.model_copy(update={"cores": None if on_gpu else 8})
    return replace(machine, network=Network(cluster))


def loss_bytes(precision: str, on_gpu: bool) -> float:
    """Return the bytes that the loss moves per logit."""
    return accesses_of("loss", ITEMSIZES[precision], on_gpu).forward * ITEMSIZES[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_bytes_per_logit_are_those_of_the_operations(precision: str) -> None:
    dtypes = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
    dtype = dtypes[precision]
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.promote_types(dtype, torch.float32))
    shard = VocabShard(0, VOCAB, (), ProcessComm(Mesh((("x", 1),)), []))
    with LogitTraffic() as traffic:
        if precision == "bf16":  # as the GEMM of a CPU leaves them
            logits = logits.bfloat16().float()
            traffic.num_bytes -= 4 * TOKENS * VOCAB + 2 * TOKENS * VOCAB
        cross_entropy_(logits, torch.arange(TOKENS), TOKENS, 1.0, shard, dtype)
    assert loss_bytes(precision, on_gpu=False) == traffic.num_bytes / (TOKENS * VOCAB)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 10.0), ("fp32", 12.0), ("fp64", 64.0)])
def test_gpus_read_the_logits_twice_and_write_the_gradient(precision: str, expected: float) -> None:
    assert loss_bytes(precision, on_gpu=True) == expected


@pytest.mark.parametrize("preset", ["llama-8b", "modes/3d", "modes/2d-weight-stationary", "gpt3-175b"])
@pytest.mark.parametrize("chunk", ["train.loss_chunk_tokens=64", "train.loss_chunk_mb=1"])
def test_chunks_are_those_of_the_head(preset: str, chunk: str) -> None:
    config = read_config(ROOT / "configs" / f"{preset}.yaml", [chunk, "model.vocab_size=50257"]).config
    size = RunSpec(config, vocab_size=50257).sizes.model
    spec = RunSpec(config, size, 50257)
    train, machine = config.train, machine_of("bf16", on_gpu=True)
    limit, plan = spec.loss_chunk(on_gpu=True), spec.mode.expand.on(spec.mesh)
    sizes = spec.arch, spec.mode, spec.mesh, train.micro_batch_size, 2, NO_RECOMPUTE, spec.overlap
    local = LocalSizes(*sizes, loss_chunk=limit)
    head = LMHead(plan, ProcessComm(spec.mesh, []), 50257, spec.arch.padded_vocab_size, limit)
    chunks = head.chunks(torch.empty(local.tokens, 1, dtype=torch.bfloat16))
    assert head_operations(local)[1].chunks == len(chunks) > 1
    one, whole = (ends_times(each, machine)[1].forward for each in (local, replace(local, loss_chunk=WHOLE_LOSS)))
    assert one.compute > whole.compute
