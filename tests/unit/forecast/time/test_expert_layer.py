"""Fact: tokens on their way to experts cost what the shared experts' GEMMs of the same pass do not hide.

The bug that this finds: the whole exchange is exposed, or hidden, or hidden by weight gradients that come later.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.breakdown import SLOWDOWN, TimeBreakdown, is_exposed
from megatron3d.forecast.time.layer import LayerTimes, Machine, layer_times
from megatron3d.forecast.time.step import load_machine
from megatron3d.forecast.time.tasks import TOKENS
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operations import layer_operations
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.modes.mode import ALLTOALL, DISPATCHERS

RANKS, HIDDEN, SHARED, SEQ, TOPK = 4, 512, 1024, 512, 2
MODEL = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 64, "seq_length": SEQ}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": TOPK, "moe_ffn_hidden_size": 48}


def a_layer(dispatcher: str, shared: int, is_full: bool = False) -> tuple[LocalSizes, Machine]:
    """Return a rank's sizes of a layer with experts over all ranks, and the machine."""
    model = {"family": "llama", **MODEL, **EXPERTS, "moe_shared_expert_intermediate_size": shared or None}
    parallel = {"expert_model_parallel_size": RANKS, "moe_token_dispatcher_type": dispatcher}
    train = {"micro_batch_size": 2, "global_batch_size": 2 * RANKS, "precision": "bf16"}
    train |= {"recompute_granularity": "full"} if is_full else {}
    config = Config.model_validate({"model": model, "parallel": parallel, "train": train})
    local = make_step_spec(RunSpec(config, RANKS, 61)).local
    return local, load_machine("selene", "bf16", RANKS)


def waits(local: LocalSizes, machine: Machine, overlaps: bool) -> LayerTimes:
    """Return the times of a layer of a framework that overlaps tokens with shared experts, or does not."""
    profile = replace(machine.profile, alone=frozenset() if overlaps else frozenset({TOKENS}))
    return layer_times(local, replace(machine, profile=profile))


def exposed(times: TimeBreakdown) -> float:
    return sum(seconds for kind, seconds in times.items() if is_exposed(kind))


@pytest.mark.parametrize("shared", [16, 65_536])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_tokens_are_hidden_as_far_as_the_shared_experts_last(dispatcher: str, shared: int) -> None:
    local, machine = a_layer(dispatcher, shared)
    axes, tokens = local.mesh.nontrivial(local.mode.experts), 2 * SEQ
    sent = tokens * HIDDEN * 2 * (TOPK * (RANKS - 1) / RANKS if dispatcher == ALLTOALL else RANKS - 1)
    verbs = ("all_to_all", "all_to_all") if dispatcher == ALLTOALL else ("all_gather", "reduce_scatter")
    there_s, back_s = (machine.network.seconds(Traffic(verb, axes, sent), local.mesh) for verb in verbs)
    gemm_s = machine.device.gemm_s(tokens, 2 * shared, HIDDEN) + machine.device.gemm_s(tokens, HIDDEN, shared)
    bare, covered = (waits(local, machine, overlaps) for overlaps in (False, True))
    assert (gemm_s > there_s) == (shared > 16), "one case of each"
    expected = {"forward": min(there_s, gemm_s), "input_grad": min(back_s, gemm_s)}
    expected |= {"weight_grad": 0.0, "backward": min(back_s, 2 * gemm_s)}
    for name, hidden in expected.items():
        before, after = getattr(bare, name), getattr(covered, name)
        assert exposed(before) - exposed(after) == pytest.approx(hidden, rel=1e-9)
        slowed = after.get(SLOWDOWN, 0.0) - before.get(SLOWDOWN, 0.0)
        assert slowed == pytest.approx(hidden * machine.device.comm_tax, rel=1e-9)


def test_the_forward_that_is_recomputed_hides_as_the_first_one() -> None:
    """It hides as much of the tokens, and does not send again what the first one sent once."""
    plain, again = (waits(*a_layer(ALLTOALL, SHARED, is_full), overlaps=True) for is_full in (False, True))
    slowed = again.backward[SLOWDOWN] - plain.backward[SLOWDOWN]
    assert slowed == pytest.approx(plain.forward[SLOWDOWN], rel=1e-9) and slowed > 0
    local, machine = a_layer(ALLTOALL, SHARED)
    once = [call for each in layer_operations(local) for call in each.sent]
    for call in (call for each in layer_operations(local) for call in each.sent_again(())):
        once.remove(call)
    once_s = sum(machine.network.seconds(call, local.mesh) for call in once)
    sent_again = exposed(again.backward) - exposed(plain.backward)
    assert sent_again == pytest.approx(exposed(plain.forward) - once_s, rel=1e-9) and once


def test_without_shared_experts_nothing_is_hidden() -> None:
    local, machine = a_layer(ALLTOALL, 0)
    assert waits(local, machine, overlaps=True) == waits(local, machine, overlaps=False)
