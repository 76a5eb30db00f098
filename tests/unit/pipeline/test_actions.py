"""Fact: actions are written and parsed as in torch.distributed.pipelining, and depend on what its runtime waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from megatron3d.pipeline.actions import Action, ActionKind, completed_by, parse_action, rank_in_loop, rank_in_v
from tests.support.dependencies import dependencies

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741  the field's names


@given(kind=st.sampled_from(ActionKind), stage=st.integers(0, 99), mb=st.integers(0, 999))
def test_torch_reads_our_actions_and_we_read_torchs(kind: ActionKind, stage: int, mb: int) -> None:
    action = Action(kind, stage, None if kind is ActionKind.REDUCE else mb)
    theirs = _Action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
        stage,
        kind.value,
        action.mb,
    )
    assert parse_action(f" {theirs} ") == action


@pytest.mark.parametrize(
    "text", ["", "0", "F0", "0F", "0X1", "0F1x", "-1F0", "0UNSHARD", "(0F1;0B0)OVERLAP_F_B", "0f1"]
)
def test_text_that_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no action such as"):
        parse_action(text)


def test_placements() -> None:
    assert [rank_in_loop(stage, 3) for stage in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [rank_in_v(stage, 3) for stage in range(7)] == [0, 1, 2, 2, 1, 0, 0]


def test_predecessors() -> None:
    def needs(text: str) -> list[str]:
        return [str(action) for action in dependencies(parse_action(text), num_stages=3)]

    assert needs("0F4") == [] and needs("2F4") == ["1F4"]
    assert needs("2I4") == ["2F4"] and needs("1B4") == ["1F4", "2I4"]
    assert needs("1W4") == ["1I4"]
    assert completed_by(Action(B, 1, 4)) == (Action(I, 1, 4), Action(W, 1, 4))
    assert completed_by(Action(F, 1, 4)) == (Action(F, 1, 4),)
