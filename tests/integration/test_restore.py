"""Fact: a state in the memory of ranks goes on in any other layout bit for bit, also after some ranks are gone.

Weights, moments, averages, state of whole matrices and of routers, loss scale, counters and place in the data are those
of one step: of the newest one of which every element is in memory, else of the newest checkpoint on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint.held import Held, HeldStep, hand_over
from megatron3d.checkpoint.pieces import Piece
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.checkpointing import held_pieces
from megatron3d.train.restore import Restored, held_state, restore
from megatron3d.train.state import TrainState
from tests.integration.test_resharding import (
    BATCH,
    IDENTITY,
    LAYOUTS,
    SECTIONS,
    VOCAB_SIZE,
    advance,
    build,
    experts,
    pipeline,
    tensor,
)
from tests.support.checkpoints import save_state
from tests.support.tiny_run import stored
from tests.support.turn_ranks import make_comm, run_turns

# Layouts by name, with their number of ranks.
RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (4, LAYOUTS[name]) for name in LAYOUTS},
    "one process": (1, {}),
    "1d, data 2": (4, tensor("1d", 2)),
    "1d on two": (2, tensor("1d", 2)),
    "pipeline of two": (2, pipeline(2, "1f1b")),
    "ZeRO 3 on two, experts 2": (2, {"zero_stage": 3, **experts(2)}),
    "ZeRO 1": (4, {"zero_stage": 1}),
    "ZeRO 1 in groups": (4, {"zero_stage": 1, "num_distributed_optimizer_instances": 2}),
    "data 3": (3, {}),
}
RULES: dict[str, dict[str, Any]] = {"adam": {}, "soap": {"optimizer": "soap"}}


def configure(layout: str, rule: str = "adam", precision: str = "fp64") -> Config:
    ranks, parallel = RANKS[layout]
    batch = 6 if ranks == 3 else BATCH
    for micro in (8, 4, 2, 1):
        train = {"precision": precision, "bucket_mb": 0.01, "micro_batch_size": micro, "global_batch_size": batch}
        optimizer = {**SECTIONS["optimizer"], **RULES[rule]}
        config = Config.model_validate({**SECTIONS, "optimizer": optimizer, "parallel": parallel, "train": train})
        if not check(config, ranks, VOCAB_SIZE) and RunSpec(config, ranks).num_microbatches >= 1:
            return config
    raise AssertionError(f"no batch fits {layout}: {check(config, ranks, VOCAB_SIZE)}")


def make(rank: int, world_size: int, config: Config, steps: Sequence[int], root: Path | None = None) -> Held:
    """Train, and return what this rank holds after each of these numbers of steps, the last one as its live state.

    With `root`, the first of them is saved on disk as well.
    """
    state, held = build(rank, world_size, config), list[HeldStep]()
    for step in steps:
        advance(config, state, step - state.iteration)
        (now,) = held_state(state, IDENTITY)
        held.append(now if step == steps[-1] else copied(now))
        if root is not None and step == steps[0]:
            save_state(root, state, IDENTITY)
    return held


def copied(step: HeldStep) -> HeldStep:
    """Return a snapshot of a step."""
    return HeldStep(step.meta, [replace(piece, tensor=piece.tensor.clone()) for piece in step.pieces])


def assembled(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        values = whole.setdefault(piece.name, torch.full(piece.shape, torch.nan, dtype=piece.tensor.dtype))
        values[tuple(slice(*ends) for ends in piece.box)] = piece.tensor
    assert not any(values.isnan().any() for values in whole.values())
    return whole


def counters(state: TrainState) -> tuple[float, ...]:
    scale = {name: value.item() for name, value in state.loss_scale.state().items()}
    return state.iteration, state.consumed_samples, state.optimizer.num_steps.item(), *scale.values()


def go_on(
    rank: int, world_size: int, config: Config, held: Sequence[Held], folder: Path | None = None
) -> tuple[Restored, tuple[float, ...], list[Piece]]:
    """Restore in another layout; return what was restored, the counters, and the pieces."""
    state = build(rank, world_size, config)
    found = restore(state, held[rank] if rank < len(held) else (), folder, IDENTITY)
    return found, counters(state), held_pieces(state)


def at(held: Sequence[Held], iteration: int) -> list[Piece]:
    """Return all pieces of a step."""
    return [piece for rank in held for step in rank if step.meta["iteration"] == iteration for piece in step.pieces]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, values in expected.items() if not values.equal(found[name])] == []


def with_peers(held: Sequence[Held], lost: int) -> list[Held]:
    """Return what is left without one rank, where each rank also holds the boxes of the one before."""
    ranks = len(held)
    return [(*held[rank], *held[rank - 1]) for rank in range(ranks) if rank != lost]


PAIRS = [
    ("1d, data 2, experts 4", "3d, experts 2"),
    ("ZeRO 1", "ZeRO 3 on two, experts 2"),
    ("grid, 1f1b", "one process"),
    ("pipeline of two", "2.5d"),
    ("zb-v, ZeRO 3, experts 2", "1d on two"),
    ("3d, experts 2", "pipeline of two"),
    ("ZeRO 3 in groups, experts 2 split over 2", "data 3"),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bits_and_counters_survive_another_layout_without_a_rank(source: str, target: str, rule: str) -> None:
    ranks = RANKS[source][0]
    held = run_turns(make, ranks, configure(source, rule), [2])
    expected = assembled(at(held, 2))
    left = with_peers(held, lost=1)
    results = run_turns(go_on, RANKS[target][0], configure(target, rule), moved(left, RANKS[target][0]))
    assert {(found.iteration, found.folder) for found, _, _ in results} == {(2, None)}
    assert {numbers for _, numbers, _ in results} == {(2, 2 * BATCH, 2.0)}
    assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), expected)


def test_replicas_stand_in_for_lost_ranks() -> None:
    """No rank keeps a copy of another: two of four data ranks, or one of each ZeRO shard's two, are enough."""
    for source, lost in (("1d, data 2", {0, 3}), ("ZeRO 1 in groups", {0, 3})):
        held = run_turns(make, 4, configure(source), [1])
        expected = assembled(at(held, 1))
        left = [each for rank, each in enumerate(held) if rank not in lost]
        results = run_turns(go_on, 2, configure("ZeRO 3 on two, experts 2"), moved(left, 2))
        assert {found.iteration for found, _, _ in results} == {1}
        assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), expected)


def test_a_missing_box_falls_back_to_the_older_step_as_a_whole(tmp_path: Path) -> None:
    """The newest step lacks one rank's boxes: every box, and the counters, are those of the step before it."""
    source, target = "1d with sequences, experts 2", "pipeline of two"
    held = run_turns(make, 4, configure(source), [1, 2, 3], tmp_path)
    lost = [[step for step in each if rank != 2 or step.meta["iteration"] < 3] for rank, each in enumerate(held)]
    (found, numbers, _), *_ = results = run_turns(go_on, 2, configure(target), moved(lost, 2), tmp_path)
    assert (found.iteration, found.folder, numbers[:2]) == (2, None, (2, 2 * BATCH))
    assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), assembled(at(held, 2)))


def moved(held: Sequence[Held], ranks: int) -> list[Held]:
    """Return what is held where the ranks of a layout have received all; further ranks are new and hold nothing."""
    return [[step for each in held[rank::ranks] for step in each] for rank in range(ranks)]


@pytest.mark.parametrize("num_lost", [1, 4])
def test_without_a_complete_step_in_memory_the_disk_is_read(tmp_path: Path, num_lost: int) -> None:
    source, target = "1d with sequences, experts 2", "pipeline of two"
    held = run_turns(make, 4, configure(source), [1, 2], tmp_path)
    left = [() if rank < num_lost else each[1:] for rank, each in enumerate(held)]
    (found, numbers, _), *_ = results = run_turns(go_on, 2, configure(target), moved(left, 2), tmp_path)
    assert (found.iteration, found.folder) == (1, tmp_path / "iter_0000001")
    assert numbers[:2] == (1, BATCH) and found.received_bytes == 0 and found.disk_bytes > 0
    assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), stored(tmp_path, 1))


def test_a_newer_checkpoint_on_disk_is_taken_before_an_older_step_in_memory(tmp_path: Path) -> None:
    source = "1d on two"
    held = run_turns(make, 2, configure(source), [1, 2], tmp_path)
    older = run_turns(make, 2, configure(source), [1])
    run_turns(make, 2, configure(source), [2], tmp_path)
    (found, _, _), *_ = run_turns(go_on, 2, configure(source), older, tmp_path)
    assert found.folder == tmp_path / "iter_0000002"
    (found, _, _), *_ = run_turns(go_on, 2, configure(source), held, tmp_path)
    assert (found.iteration, found.folder) == (2, None), "memory is faster than the disk"
    (tmp_path / "iter_0000002" / "rank_00000.safetensors").write_bytes(b"")
    (found, _, _), *_ = run_turns(go_on, 2, configure(source), older, tmp_path)
    assert (found.iteration, found.folder) == (1, None) and "rank_00000" in found.skipped[0][1]


def test_the_same_iteration_of_another_history_is_another_step() -> None:
    """After a rollback an iteration comes again with other samples: catches boxes that are told apart by it alone."""
    source = "1d with sequences, experts 2"
    held = run_turns(make, 4, configure(source), [1, 2])
    other = [HeldStep({**step.meta, "consumed_samples": 3 * BATCH}, step.pieces) for step in held[0][1:]]
    left = [(held[0][0], *other), *held[1:]]
    (found, _, _), *_ = run_turns(go_on, 4, configure(source), left)
    assert found.iteration == 1


def test_nothing_anywhere_leaves_the_state_and_a_half_update_is_not_held(tmp_path: Path) -> None:
    def alone(rank: int, world_size: int) -> None:
        config = configure("one process")
        state = build(rank, world_size, config)
        before = assembled(held_pieces(state))
        assert restore(state, (), tmp_path, IDENTITY).iteration is None
        assert_same(assembled(held_pieces(state)), before)
        assert len(held_state(state, IDENTITY)) == 1
        state.update.begin()
        assert held_state(state, IDENTITY) == ()
        state.update.end()
        assert len(held_state(state, IDENTITY)) == 1 and held_state(state, IDENTITY, is_complete=False) == ()

    run_turns(alone, 1)


def test_losses_go_on_as_if_nothing_had_happened() -> None:
    """One of four ranks is lost after two steps: the next two equal those of a run without a failure (1e-10)."""

    def undisturbed(rank: int, world_size: int) -> list[float]:
        config = configure("1d, data 2")
        return advance(config, build(rank, world_size, config), 4)[4:]

    def interrupted(rank: int, world_size: int, held: Sequence[Held]) -> list[float]:
        config = configure("pipeline of two")
        state = build(rank, world_size, config)
        restore(state, held[rank], None, IDENTITY)
        return advance(config, state, 2)

    held = run_turns(make, 4, configure("1d, data 2"), [2])
    expected = run_turns(undisturbed, 4)[0]
    for numbers in run_turns(interrupted, 2, moved(held[:3], 2)):
        assert numbers == pytest.approx(expected, rel=1e-10, abs=0)


def test_ranks_that_the_new_layout_leaves_out_hand_over_what_others_lack() -> None:
    """Three survivors hold everything; the layout of two loads it all, and replicas are not sent."""
    held = run_turns(make, 4, configure("1d with sequences, experts 2"), [1, 2])
    expected = assembled(at(held, 2))
    left = with_peers(held, lost=1)

    def give(rank: int, world_size: int) -> Held:
        return hand_over(left[rank], make_comm(Mesh((("t", world_size),), rank), ()), num_kept=2)

    kept = run_turns(give, 3)[:2]
    results = run_turns(go_on, 2, configure("pipeline of two"), kept)
    assert {(found.iteration, found.folder) for found, _, _ in results} == {(2, None)}
    assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), expected)
    held = run_turns(make, 4, configure("1d, data 2"), [1])
    left = held[:3]
    assert [len(each) for each in run_turns(give, 3)] == [1, 1, 1]


def test_boxes_of_equal_numbers_are_all_handed_over() -> None:
    """Rank 1 is lost; its replica, rank 3 of two times two ranks, has no place in the new layout.

    Bug that this finds: of the boxes of equal tensors in several layers only the last one was filled.
    """
    config = configure("1d, data 2")
    held = run_turns(make, 4, config, [1])
    expected = assembled(at(held, 1))
    left = [held[rank] for rank in (0, 2, 3)]

    def give(rank: int, world_size: int) -> Held:
        return hand_over(left[rank], make_comm(Mesh((("t", world_size),), rank), ()), num_kept=2)

    results = run_turns(go_on, 2, configure("1d on two"), run_turns(give, 3)[:2])
    assert {(found.iteration, found.folder) for found, _, _ in results} == {(1, None)}
    assert_same(assembled([piece for _, _, pieces in results for piece in pieces]), expected)


def test_loss_scale_of_fp16_is_restored() -> None:
    def make_scaled(rank: int, world_size: int, config: Config) -> Held:
        state = build(rank, world_size, config)
        for place, value in enumerate(state.loss_scale.state().values()):
            value.fill_(2.0 ** (place + 1))
        state.optimizer.set_num_steps(7)
        return held_state(state, IDENTITY)

    held = run_turns(make_scaled, 2, configure("1d on two", precision="fp16"))
    for _, numbers, _ in run_turns(go_on, 2, configure("pipeline of two", precision="fp16"), held):
        assert numbers == (0, 0, 7.0, 2.0, 4.0, 8.0)


def test_a_state_of_another_run_is_refused_on_all_ranks() -> None:
    held = run_turns(make, 2, configure("1d on two"), [1])

    def other(rank: int, world_size: int) -> None:
        state = build(rank, world_size, configure("1d on two"))
        with pytest.raises(UserError, match=r"in memory, of iteration 1: saved with train.seed=1234"):
            restore(state, held[rank], None, {**IDENTITY, "train.seed": 5})

    run_turns(other, 2)
