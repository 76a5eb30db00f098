"""Fact: every schedule is valid for all sizes, uses the stated ranks, and holds as many activations as published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from megatron3d.errors import UserError
from megatron3d.pipeline.actions import Costs, Schedule, stage_to_rank
from megatron3d.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    interleave_group_size,
    load_schedule,
    num_microbatches,
    schedule_problems,
)
from megatron3d.pipeline.simulate import num_virtual_stages, peak_activations
from megatron3d.pipeline.validate import execution_problems, write_schedule

RANKS, MICROBATCHES = st.integers(1, 8), st.integers(1, 24)


@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)), p=RANKS, m=MICROBATCHES)
def test_every_schedule_is_valid(data: st.DataObject, name: str, p: int, m: int) -> None:
    entry = SCHEDULES[name]
    v = data.draw(st.integers(entry.min_virtual, entry.max_virtual or 4))
    schedule = build_schedule(name, p, m, v)
    assert execution_problems(schedule) == []
    assert len(schedule) == p and num_virtual_stages(schedule) == v and num_microbatches(schedule) == m
    assert stage_to_rank(schedule) == {stage: entry.rank_of_stage(stage, p) for stage in range(p * v)}


@given(p=RANKS, m=MICROBATCHES, times=st.tuples(*[st.floats(0.1, 10)] * 3), comm=st.floats(0, 1))
def test_zb_2p_is_valid_for_any_costs(p: int, m: int, times: tuple[float, float, float], comm: float) -> None:
    schedule = build_schedule("zb-2p", p, m, costs=Costs(*times, comm=comm))
    assert execution_problems(schedule) == []
    assert max(peak_activations(schedule, wgrad_fraction=0)) <= 2 * p


@given(p=RANKS, m=MICROBATCHES)
def test_zb_2p_for_equal_costs_is_zb_h2(p: int, m: int) -> None:
    assert build_schedule("zb-2p", p, m) == build_schedule("zb-h2", p, m)


@given(p=RANKS, m=MICROBATCHES)
def test_activations_in_flight(p: int, m: int) -> None:
    peaks = {name: peak_activations(build_schedule(name, p, m)) for name in SCHEDULES}
    ranks = range(p)
    assert peaks["gpipe"] == (m,) * p
    assert peaks["1f1b"] == tuple(min(p - r, m) for r in ranks)
    assert peaks["zb-h1"] == (min(p, m),) * p
    assert peaks["zb-h2"] == (min(2 * p - 1, m),) * p
    assert max(peaks["zb-v"]) <= 2 * max(peaks["1f1b"])


@given(p=RANKS, share=st.floats(0, 1))
def test_activations_of_deferred_weight_gradients_equal_the_papers(p: int, share: float) -> None:
    """Qi et al. 2023: worker i = r + 1 holds (p-i+1) M_B + (i-1) M_W, or (2p-2i+1) M_B + (2i-2) M_W."""
    h1 = peak_activations(build_schedule("zb-h1", p, 3 * p), share)
    h2 = peak_activations(build_schedule("zb-h2", p, 3 * p), share)
    assert h1 == pytest.approx([(p - r) + r * share for r in range(p)])
    assert h2 == pytest.approx([2 * (p - r) - 1 + 2 * r * share for r in range(p)])


@given(p=RANKS, v=st.integers(2, 4), rounds=st.integers(2, 3))
def test_activations_of_interleaving_equal_megatrons(p: int, v: int, rounds: int) -> None:
    """The count is the warm-up of Megatron's schedule and the forward after it, in stages of 1/v of a rank."""
    peaks = peak_activations(build_schedule("interleaved", p, rounds * p, v))
    assert peaks == tuple(min(2 * (p - r - 1) + (v - 1) * p + 1, rounds * p * v) for r in range(p))


@given(p=RANKS, m=MICROBATCHES)
def test_groups_follow_megatrons_rule(p: int, m: int) -> None:
    def allowed(n: int) -> bool:
        return m % n == 0 or m % n >= p

    group = interleave_group_size(p, m)
    assert group == m if m < p else p <= group <= m and allowed(group)
    assert not any(allowed(smaller) for smaller in range(p, group))


def test_groups_of_four_ranks() -> None:
    assert [interleave_group_size(4, m) for m in (3, 4, 7, 8, 9, 10, 11, 15, 16)] == [3, 4, 7, 4, 5, 5, 6, 5, 4]


def test_orders_equal_the_papers_figures() -> None:
    """Four ranks: 1F1B of Megatron's figure 3, ZB-H1 and ZB-H2 of figures 2 and 3, the first rank of ZB-V's figure."""

    def text(name: str, rank: int, m: int) -> str:
        return " ".join(map(str, build_schedule(name, 4, m)[rank]))

    assert text("1f1b", 2, 4) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3"
    assert text("zb-h1", 2, 4) == "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3"
    assert text("zb-h2", 3, 8).startswith("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2")
    assert text("zb-v", 0, 8).startswith("0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1")
    assert text("interleaved", 0, 4).startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B0")


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule]


def torchs(schedule: type, p: int, m: int, v: int) -> list[str]:
    """Return the lists of torch's own class by its method alone, since building it needs stages and a process group."""
    rounds = max(1, m // p)
    sizes = {"n_local_stages": v, "num_stages": p * v, "pp_group_size": p, "microbatches_per_round": m // rounds}
    self = SimpleNamespace(_n_microbatches=m, number_of_rounds=rounds, **sizes)
    ranks = (schedule._calculate_single_rank_operations(self, rank) for rank in range(p))  # type: ignore[attr-defined]
    return [" ".join(str(action) for action in actions if action is not None) for actions in ranks]


@given(p=st.integers(2, 8), m=MICROBATCHES, v=st.integers(2, 4))
def test_orders_equal_those_of_torch(p: int, m: int, v: int) -> None:
    """Interleaving agrees where m is a multiple of p; elsewhere torch has another rule, or refuses."""
    whole = p * (m // 8 + 1)
    assert texts(build_schedule("zb-v", p, m)) == torchs(ScheduleZBVZeroBubble, p, m, 2)
    assert texts(build_schedule("interleaved", p, whole, v)) == torchs(ScheduleInterleaved1F1B, p, whole, v)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("zb-w", 4, 8, None), "there is none of this name; use gpipe, 1f1b,"),
        (("1f1b", 0, 8, None), "the number of ranks p=0 must be at least 1; use 1"),
        (("1f1b", 4, 0, None), "the number of microbatches m=0 must be at least 1"),
        (("1f1b", 4, 8, 2), "takes v=1 virtual stages per rank, not v=2; use v=1, or interleaved or zb-v"),
        (("zb-v", 4, 8, 3), "takes v=2 virtual stages per rank, not v=3; use v=2, or interleaved"),
        (("interleaved", 4, 8, 1), "takes v=2 or more virtual stages per rank, not v=1; use v=2, or gpipe or 1f1b"),
    ],
)
def test_unsupported_sizes_of_a_schedule_are_refused(request_: tuple[str, int, int, int | None], message: str) -> None:
    (problem,) = schedule_problems(*request_)
    assert message in problem and request_[0] in problem
    with pytest.raises(UserError) as error:
        build_schedule(*request_)
    assert error.value.problems == (problem,)


def test_a_file_is_for_its_own_sizes(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    schedule = build_schedule("zb-v", 3, 5)
    write_schedule(schedule, path)
    assert load_schedule(path) == load_schedule(path, p=3, m=5) == schedule
    with pytest.raises(UserError) as error:
        load_schedule(path, p=4, m=8)
    assert "has 3 ranks p, not 4; use 3" in str(error.value) and "has 5 microbatches m, not 8" in str(error.value)
