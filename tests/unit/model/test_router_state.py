"""Fact: the bias of the choice and the load move once per step by the counts of the global batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.router_state import RouterCounts, RouterState
from megatron3d.parallel.mesh import Mesh
from megatron3d.verify.layouts import trace
from tests.support.equality import MODELS, VOCAB_SIZE, configure
from tests.support.turn_ranks import connect, run_turns

NAME, EXPERTS = "layers.1.mlp.router", 8
BIAS = f"expert_bias.{NAME} of step"
MODEL = {
    **MODELS["experts, shared experts, losses of routers"],
    "moe_router_load_balancing_type": "global_aux_loss",
    "num_layers": 2,
}


def run(rank: int, world_size: int, train: dict[str, Any], parallel: dict[str, Any]) -> Any:
    spec = RunSpec(configure(MODEL, parallel, global_batch_size=8, **train), world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), 2)


def test_accumulation_and_recomputation_count_each_token_once() -> None:
    """Microbatches of 2, 4 and 8 sequences give one bias and one load, recomputed or not, and on 2 ranks."""
    full = {"recompute_granularity": "full", "recompute_num_layers": 1}
    traces = [run(0, 1, {"micro_batch_size": 4, **full}, {})]
    traces += [run(0, 1, {"micro_batch_size": 8}, {}), run_turns(run, 2, {"micro_batch_size": 2}, {})[0]]
    for table in ("expert_bias", "load"):
        for step in (1, 2):
            rows = [each[f"{table}.{NAME} of step {step}"].tolist() for each in traces]
            assert all(row == rows[0] for row in rows), (table, step)
    losses = torch.stack([each["loss of step 2"] for each in traces])
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-12, atol=0)
    assert {round(each, 6) for each in traces[0][f"{BIAS} 1"].tolist()} <= {-0.05, 0.0, 0.05}
    # The load is the share of tokens: it adds up to the experts of a token.
    assert traces[0][f"load.{NAME} of step 1"].sum().item() == pytest.approx(3)


def state() -> RouterState:
    found = RouterState(RunSpec(configure(MODEL, {}, micro_batch_size=8, global_batch_size=8), 1, VOCAB_SIZE).arch)
    found.add(NAME)
    found.allocate(torch.device("cpu"))
    return found


def step(routers: RouterState, chosen: list[list[int]], skipped: float = 0.0) -> RouterCounts:
    """Count one microbatch of even scores, and update."""
    routers.begin_step(is_watched=True)
    routers.count(NAME, torch.tensor(chosen), torch.full((len(chosen), EXPERTS), 0.5))
    counts = routers.reduce(ProcessComm(Mesh((("pipeline", 1), ("replica", 1), ("data", 1))), ()))
    routers.update(counts, torch.tensor(skipped))
    assert counts is not None, "a watched step counts"
    return counts


def test_a_bias_rises_where_the_load_is_below_the_mean() -> None:
    """8 choices of 8 experts: the mean is 1, which neither raises nor lowers."""
    routers, chosen = state(), [[0, 1], [0, 1], [0, 2], [0, 3]]
    counts = step(routers, chosen)
    bias, load = routers.row(NAME, "expert_bias"), routers.row(NAME, "load")
    assert bias is not None and load is not None
    torch.testing.assert_close(bias, 0.05 * torch.tensor([-1.0, -1, 0, 0, 1, 1, 1, 1]))
    torch.testing.assert_close(load, 3 / 8 * torch.tensor([4.0, 2, 1, 1, 0, 0, 0, 0]))
    row, *_ = counts.rows(2, has_bias=True)
    even = {"max_load": 4.0, "entropy": math.log(EXPERTS), "dropped": 0.0, "bias_min": 0.0, "bias_max": 0.0}
    even |= {"global_aux_loss": 0.0, "z_loss": 0.0}
    assert row == pytest.approx(even)
    before = bias.clone(), load.clone()
    row, *_ = step(routers, [[6, 7]], skipped=1.0).rows(2, has_bias=True)
    assert torch.equal(bias, before[0]) and torch.equal(load, before[1]), "a skipped step leaves both"
    assert (row["bias_min"], row["bias_max"]) == pytest.approx((-0.05, 0.05))


def test_all_tokens_may_go_to_one_expert() -> None:
    row, *_ = step(state(), 5 * [[7]]).rows(1, has_bias=False)
    assert row["max_load"] == EXPERTS


def test_dropped_choices_are_a_share_of_all() -> None:
    routers = state()
    routers.begin_step(is_watched=True)
    routers.count(NAME, torch.tensor([[0, 1], [0, 2]]), torch.ones(2, EXPERTS))
    routers.count_dropped(NAME, torch.tensor([[True, True], [False, True]]))
    counts = routers.reduce(ProcessComm(Mesh((("pipeline", 1), ("replica", 1), ("data", 1))), ()))
    assert counts is not None and counts.rows(2, has_bias=False)[0]["dropped"] == 0.25


def test_nothing_is_counted_outside_of_a_step() -> None:
    routers = state()
    routers.count(NAME, torch.tensor([[1]]), torch.ones(1, EXPERTS))
    assert step(routers, [[0]]).choices_LE.sum() == 1
