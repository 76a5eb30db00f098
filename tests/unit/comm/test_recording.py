"""Fact: the traffic of every mode's matmuls, forward and backward, is their closed form.

Collectives, axes and bytes are equal, on real ranks and on any rank of a simulated world; so is the traffic between
pipeline stages, for any mode and schedule.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.parallel.layout import box, box_shape
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, crossing, traffic
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.pipeline.actions import RECEIVES, SENDS, Schedule, forward_only, stage_to_rank
from megatron3d.pipeline.lower import count_transfers, lower
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import peak_activations
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, evaluate, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.matmuls import linear
from tests.support.shards import plan_comm, pretended_world
from tests.support.toy_pipeline import HIDDEN, ToyPipeline, process_comm
from tests.support.turn_ranks import connect, run_turns
from tests.unit.pipeline.test_lower import schedules

EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
FUSED = {
    "gather over two axes at once": MatmulPlan(m=("a",), n=("b", "c"), x={"b": "M", "c": "M"}, w={"a": "K"}),
    "two dimensions in turn": MatmulPlan(n=("a", "b", "c"), x={"a": "M", "c": "K"}),
    "scatter, all-reduce, scatter": MatmulPlan(k=("a", "b", "c"), y={"a": "N", "b": None, "c": "M"}),
    "gather W twice": MatmulPlan(m=("a", "b"), k=("c",), w={"a": "K", "b": "N"}, y={"c": None}),
}


def plans(size: int) -> list[tuple[str, Mesh, MatmulPlan]]:
    """Return two plans of every form at its default shape, and plans whose collectives are fused or chained."""
    cases = []
    for name, form in EVERY_FORM:
        mode = build_mode(name, form, MODES[name].default_shape(size))
        mesh = Mesh((("data", 1), *mode.axes))
        cases += [(f"{name} {form} {mode.axes}", mesh, plan) for plan in (mode.expand, mode.contract)]
    if size == 8:
        cases += [(name, Mesh((("a", 2), ("b", 2), ("c", 2))), plan) for name, plan in FUSED.items()]
    return cases


def recorded(comm: ProcessComm, plan: MatmulPlan, m: int, n: int, k: int) -> list[Traffic]:
    """Return what one forward and backward moves."""
    recorder, plan = Recorder(comm), plan.on(comm.mesh)
    x, w = (
        torch.ones(box_shape(box(shape, layout, comm.mesh)), dtype=torch.bfloat16, requires_grad=True)
        for shape, layout in (((m, k), plan.x_layout), ((n, k), plan.w_layout))
    )
    bias = torch.ones(box_shape(box((m, n), plan.y_layout, comm.mesh))[1], dtype=torch.bfloat16, requires_grad=True)
    linear(x, w, bias, plan, recorder).sum().backward()
    return recorder.calls


def difference(name: str, mesh: Mesh, plan: MatmulPlan, comm: ProcessComm) -> list[str]:
    """Return the difference of traffic and closed form, if any; the three sizes differ."""
    unit = mesh.world_size
    m, n, k = 3 * unit, 5 * unit, 7 * unit
    got, expected = sorted(recorded(comm, plan, m, n, k)), sorted(traffic(plan, mesh, m, n, k, itemsize=2))
    return [] if got == expected else [f"{name} on rank {mesh.rank}: moved {got}, closed form {expected}"]


def moved_otherwise(rank: int, world_size: int) -> list[str]:
    return [
        line
        for name, mesh, plan in plans(world_size)
        for line in difference(name, mesh.at(rank), plan, plan_comm(mesh.at(rank), plan))
    ]


@pytest.mark.parametrize("world_size", [8, 4])
def test_recorded_traffic_is_the_closed_form(world_size: int) -> None:
    assert run_turns(moved_otherwise, world_size) == [[]] * world_size


@pytest.mark.parametrize("rank", [0, 37])
def test_closed_form_on_a_rank_of_64(rank: int) -> None:
    with pretended_world(rank, 64):
        assert moved_otherwise(rank, 64) == []


def test_frozen_operands_send_less() -> None:
    """Without a gradient of W its reduction is omitted; the recorder returns results unchanged."""
    plan, mesh = FUSED["gather over two axes at once"], Mesh((("a", 2), ("b", 2), ("c", 2)))
    with pretended_world(0, 8):
        recorder = Recorder(plan_comm(mesh, plan))
        x = torch.ones(2, 4, requires_grad=True)
        linear(x, torch.ones(4, 2), None, plan, recorder).sum().backward()
    kinds = [(call.collective, call.axes) for call in recorder.calls]
    assert ("reduce_scatter", ("b", "c")) in kinds
    assert ("reduce_scatter", ("a",)) not in kinds


def test_trivial_axes_are_not_recorded() -> None:
    recorder = Recorder(ProcessComm(Mesh((("x", 1), ("y", 1))), []))
    x = torch.ones(3)
    assert recorder.all_reduce(x, ("x", "y")).wait() is x
    assert recorder.all_gather(x, ("x",), 0).wait() is x
    assert recorder.calls == []


def test_a_ring_sends_all_but_its_own_part() -> None:
    """Three ranks, eight bytes each: an all-gather sends the pieces of the two others."""
    mesh = Mesh((("x", 3),))
    with pretended_world(0, 3):
        recorder = Recorder(ProcessComm(mesh, [("x",)]))
        recorder.all_gather(torch.ones(2), ("x",), 0).wait()
        recorder.reduce_scatter(torch.ones(6), ("x",), 0).wait()
        recorder.all_reduce(torch.ones(6), ("x",)).wait()
    assert [call.wire_bytes for call in recorder.calls] == [16, 16, 32]


def pipelined(place: int, mode: str, form: str) -> Config:
    """Record a model of 8 layers in each schedule in turn, on 4 x 2 x 8 ranks."""
    name = list(SCHEDULES)[place % len(SCHEDULES)]
    model = {"num_layers": 8, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8}
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_model_parallel_size": 8}
    pipeline = {"pipeline_model_parallel_size": 4, "pipeline_schedule": name}
    train = {"micro_batch_size": 8, "global_batch_size": 80, "precision": "bf16"}
    sections = {"model": model, "parallel": parallel | pipeline, "train": train}
    config = Config.model_validate(sections)
    assert check(config, 64, 61) == []
    return config


def sent_in_a_step(config: Config, rank: int) -> tuple[list[Traffic], TrainState]:
    """Return what crosses between pipeline ranks in one step and one evaluation on a rank of 64."""
    spec = RunSpec(config, 64, 61, rank)
    comm = connect(spec)
    recorder, train = Recorder(comm), config.train
    state = build_state(spec, recorder, torch.device("cpu"))
    samples = RandomSamples(0, 61, spec.arch.seq_length)
    batch = (train.micro_batch_size, train.global_batch_size, torch.device("cpu"))
    loader = BatchLoader(samples, comm.mesh, state.model.mode.batch_axes, *batch)
    recorder.calls.clear()
    train_step(state, loader.step(0), 0.0, StepSettings(0, 80 * spec.arch.seq_length, 80))
    evaluate(state.executor, [loader.step(0)], StepSettings(0, 80 * spec.arch.seq_length, 80))
    return [call for call in recorder.calls if call.collective == "send"], state


@pytest.mark.parametrize(("place", "mode", "form"), [(place, *form) for place, form in enumerate(EVERY_FORM)])
def test_only_a_shard_crosses_a_stage_boundary(place: int, mode: str, form: str) -> None:
    """Each rank sends its shard of the activations for each boundary between stages on different ranks.

    Evaluation sends forward only.  Megatron without scatter/gather sends every rank's whole shard, replicated or not.
    """
    config = pipelined(place, mode, form)
    for rank in (0, 21, 63):
        with pretended_world(rank, 64):
            sends, state = sent_in_a_step(config, rank)
        model, schedule, mesh = state.model, state.executor.pipeline.schedule, state.model.comm.mesh
        whole = config.train.micro_batch_size * model.arch.seq_length, model.arch.hidden_size
        once, *joined = crossing(model.mode.residual, model.mode.copies, mesh, *whole, itemsize=2)
        counts = [count_transfers(each)[mesh.coord("pipeline")][0] for each in (schedule, forward_only(schedule, 5))]
        assert sends == [once] * sum(counts), f"{mode} {form} on rank {rank}"
        assert once.wire_bytes == 2 * math.prod(whole) / 8, "all ranks together send the residual stream once"
        shard_bytes = 2 * math.prod(box_shape(box(whole, model.mode.residual, mesh)))
        assert shard_bytes == once.wire_bytes * mesh.size(model.mode.copies), "what Megatron would send"
        assert bool(joined) == (shard_bytes > once.wire_bytes)
        assert state.executor.peak_in_flight == peak_activations(schedule)[mesh.coord("pipeline")]


@given(schedule=schedules())
def test_every_stage_boundary_between_ranks_is_crossed_twice(schedule: Schedule) -> None:
    where = list(stage_to_rank(schedule).values())
    borders = sum(here != there for here, there in pairwise(where))
    m = len({action.mb for action in schedule[0]})
    sent, received = (sum(counts) for counts in zip(*count_transfers(schedule), strict=True))
    assert sent == received == 2 * borders * m
    forward = count_transfers(forward_only(schedule, m))
    assert sum(counts[0] for counts in forward) == borders * m
    for counts, actions in zip(count_transfers(schedule), lower(schedule), strict=True):
        assert counts == tuple(sum(action.kind in kinds for action in actions) for kinds in (SENDS, RECEIVES))


def toy_traffic(rank: int, world_size: int, p: int, schedule: Schedule, tokens: int) -> list[Traffic]:
    """Return all traffic of a toy pipeline, whose stages communicate nothing."""
    mesh = Mesh((("pipeline", p), ("x", world_size // p)), rank)
    recorder = Recorder(process_comm(mesh, schedule, ("x",)))
    ToyPipeline(schedule, recorder, ("x",), tokens).run()
    return recorder.calls


@pytest.mark.parametrize("tokens", [4, 1])
def test_parts_of_replicated_shards_are_gathered_by_the_receivers(tokens: int) -> None:
    """Replicas on four ranks, of 20 elements, and of 5, which are padded to 8."""
    schedule = build_schedule("zb-v", 2, 3)
    ranks = run_turns(toy_traffic, 8, 2, schedule, tokens)
    for rank, calls in enumerate(ranks):
        mesh = Mesh((("pipeline", 2), ("x", 4)), rank)
        sent, joined = crossing(((), ()), ("x",), mesh, tokens, HIDDEN, itemsize=8)
        sends, receives = count_transfers(schedule)[rank // 4]
        assert sorted(calls) == [joined] * receives + [sent] * sends
        assert sent.wire_bytes == 8 * (5 if tokens == 4 else 2) and joined.wire_bytes == 3 * sent.wire_bytes
