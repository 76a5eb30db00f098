"""Fact: for any valid action list the engine computes what autograd computes without a pipeline.

It keeps exactly the graphs that the schedule counts, and frees each right after its backward.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from common.live import Live
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.mesh import Mesh
from megatron3d.pipeline.actions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    Action,
    Schedule,
    activations_in_flight,
    parse_action,
    stage_to_rank,
)
from megatron3d.pipeline.engine import MAX_SENDS_IN_FLIGHT
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import peak_activations
from megatron3d.pipeline.validate import execution_problems
from tests.support.dependencies import dependencies
from tests.support.shards import error
from tests.support.toy_pipeline import (
    HIDDEN,
    ToyPipeline,
    WatchedComm,
    any_schedule,
    process_comm,
    reference,
    run_watched,
)
from tests.support.turn_ranks import make_comm, run_turns

TOLERANCE = 1e-12
TOKENS, WIDE = 8, 200


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw up to six stages on up to four ranks, in any order and with full or split backwards."""
    p = draw(st.integers(1, 4))
    where = draw(st.permutations([*range(p), *draw(st.lists(st.integers(0, p - 1), max_size=6 - p))]))
    return any_schedule(draw(st.randoms(use_true_random=False)), where, draw(st.integers(1, 6)))


def wrong(got: list[tuple[dict[Any, Any], dict[Any, Any]]], schedule: Schedule, **sizes: int) -> list[str]:
    """Return the differences between all ranks' losses and gradients and those of autograd alone."""
    found = []
    m = len({action.mb for action in schedule[0]})
    for what, expected in enumerate(reference(len(stage_to_rank(schedule)), m, **sizes)):
        merged = {key: value for rank in got for key, value in rank[what].items()}
        assert merged.keys() == expected.keys(), f"there are {list(merged)}, not {list(expected)}"  # type: ignore[attr-defined, call-overload]
        found += [f"{key}: {e}" for key in expected if (e := error(merged[key], expected[key])) > TOLERANCE]  # type: ignore[attr-defined, index]
    return found


@given(schedule=schedules())
def test_any_valid_schedule_is_autograd(schedule: Schedule) -> None:
    assert execution_problems(schedule) == []

    def rank(comm: WatchedComm) -> tuple[tuple[dict[int, Any], dict[str, Any]], int]:
        pipeline = ToyPipeline(schedule, comm)
        results = pipeline.run()
        assert not any(comm.unwaited.values()), f"forgotten transfers: {comm.unwaited}"
        return results, pipeline.engine.peak_in_flight

    results, peaks = zip(*run_watched(schedule, rank), strict=True)
    assert wrong(list(results), schedule) == []
    assert peaks == peak_activations(schedule)


def run_processes(rank: int, world_size: int, p: int, cases: list[Schedule], tokens: int) -> list[Any]:
    copies = world_size // p
    found = []
    for schedule in cases:
        comm = process_comm(Mesh((("pipeline", p), ("x", copies)), rank), schedule, ("x",))
        pipeline = ToyPipeline(schedule, comm, ("x",), tokens)
        found.append((pipeline.run(), pipeline.engine.peak_in_flight))
    return found


@pytest.mark.parametrize(("p", "copies", "tokens"), [(4, 1, 3), (4, 2, 3), (2, 4, 1)])
def test_every_schedule_is_autograd_between_processes(p: int, copies: int, tokens: int) -> None:
    """Replicas each send a shard of the activations, of uneven sizes: of 5 elements the last of 4 ranks sends none."""
    virtual = [(name, v) for name, entry in SCHEDULES.items() for v in range(1, 4) if entry.supports(v)]
    cases = [build_schedule(name, p, m, v) for name, v in virtual for m in (3, p + 1)]
    found = run_turns(run_processes, p * copies, p, cases, tokens)
    for place, schedule in enumerate(cases):
        for copy in range(copies):
            ranks = [found[rank * copies + copy][place] for rank in range(p)]
            assert wrong([results for results, _ in ranks], schedule, tokens=tokens) == []
            assert tuple(peak for _, peak in ranks) == peak_activations(schedule)


LAYER = 3 * 8 * TOKENS * WIDE * HIDDEN  # bytes that a layer keeps per microbatch
LATE = 1 / 3  # those kept until the weight gradient


def held_bytes(rank: int, world_size: int, cases: list[tuple[Schedule, int]]) -> list[tuple[list[int], int]]:
    """Return the bytes of tensors after each computation, and their peak, relative to the start."""
    gc.disable()  # garbage that only the collector frees would be kept for long
    try:
        return [held_in_one(rank, world_size, schedule, depth) for schedule, depth in cases]
    finally:
        gc.enable()


def held_in_one(rank: int, world_size: int, schedule: Schedule, depth: int) -> tuple[list[int], int]:
    comm = process_comm(Mesh((("pipeline", world_size),), rank), schedule, ())
    pipeline = ToyPipeline(schedule, comm, tokens=TOKENS, depth=depth, wider=WIDE)
    weights = [weight for stage in pipeline.stages.values() for weight in stage.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    after = []
    with Live([*weights, *(weight.grad for weight in weights)]) as live:  # type: ignore[list-item]
        before = live.now

        @contextlib.contextmanager
        def observe(action: Action) -> Iterator[None]:
            yield
            if action.kind in COMPUTATIONS:
                after.append(live.now - before)

        pipeline.run(observe)
    return after, live.peak - before


def test_kept_graphs_are_those_that_the_schedule_counts() -> None:
    """Check after every computation, in graphs of microbatches; nothing waits for the garbage collector."""
    p, m, depth = 4, 9, 2
    cases = {name: (build_schedule(name, p, m), 1 if SCHEDULES[name].supports(2) else depth) for name in SCHEDULES}
    ranks = run_turns(held_bytes, p, list(cases.values()))
    peaks = {name: [ranks[rank][place][1] / LAYER for rank in range(p)] for place, name in enumerate(cases)}
    for place, (name, (schedule, layers)) in enumerate(cases.items()):
        for rank, actions in enumerate(schedule):
            after, _ = ranks[rank][place]
            counted = [count * layers for count in activations_in_flight(actions, LATE)]
            for action, got, expected in zip(actions, after, counted, strict=True):
                assert abs(got / LAYER - expected) < 0.1, f"{name} rank {rank} after {action}: {got / LAYER} layers"
            assert after[-1] < LAYER / 10
    assert peaks["1f1b"] == [pytest.approx((p - rank) * depth + 1, abs=0.1) for rank in range(p)]
    assert max(peaks["zb-v"]) < peaks["1f1b"][0] + 0.1, "half of a stage twice is no more than a whole one"


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_start_in_list_order_and_only_inputs_are_waited_for(name: str) -> None:
    """Receives are posted early, sends do not block, at most a few are in flight; a trace does not time the waiting."""
    schedule = build_schedule(name, 3, 7)
    lowered, where = lower(schedule), stage_to_rank(schedule)

    def rank(comm: WatchedComm) -> list[str]:
        @contextlib.contextmanager
        def observe(action: Action) -> Iterator[None]:
            comm.events.append(str(action))
            yield
            assert comm.unwaited["send"] <= MAX_SENDS_IN_FLIGHT + 1, f"{comm.unwaited} transfers under way"

        ToyPipeline(schedule, comm).run(observe)
        return [event for event in comm.events if event != "wait for send"]

    for actions, events in zip(lowered, run_watched(schedule, rank), strict=True):
        expected = []
        for action in actions:
            needed = [need for need in dependencies(action, len(where)) if where[need.stage] != where[action.stage]]
            if action.kind in COMPUTATIONS and needed:
                expected.append("wait for receive")
            begins = "send" if action.kind in SENDS else "receive" if action.kind in RECEIVES else None
            expected += [str(action), *([begins] if begins else [])]
        assert events == expected


@pytest.mark.parametrize("text", ["0F0", "0F0 0I0"])
def test_an_incomplete_schedule_is_an_error(text: str) -> None:
    """A graph, or deferred weight gradients, that remain unused after the schedule are an error."""
    pipeline = ToyPipeline(build_schedule("1f1b", 1, 1), make_comm(Mesh((("pipeline", 1),)), []))
    pipeline.engine._actions = tuple(map(parse_action, text.split()))
    with pytest.raises(AssertionError, match="the schedule is incomplete"):
        pipeline.engine.run()


def test_an_input_gradient_alone_needs_a_queue_for_the_weight_gradient() -> None:
    pipeline = ToyPipeline(build_schedule("zb-h1", 1, 1), make_comm(Mesh((("pipeline", 1),)), []))
    pipeline.engine._wgrads = None
    with pytest.raises(AssertionError, match="nothing defers weight gradients: 0I0"):
        pipeline.engine.run()
