"""Fact: every parameter lies in one flat buffer of its kind and stage, whose shards are equal and cover it once.

This holds for any remainder; gradient sums and master weights are fp32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron3d.parallel.mesh import Link, Mesh
from megatron3d.zero import Buffers, FsdpUnit, Sharding
from tests.support.fsdp_chain import CPU, MESH, Echo, chain, fill_main, parameters, sharding, spec

SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)


def build(specs: dict[str, Any], mesh: Mesh, zero_stage: int, bucket_bytes: float = 1, **options: Any) -> Buffers:
    comm: Any = Echo(mesh)
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(0, device="meta")) for name in specs})
    model = nn.ModuleDict({"all": model})  # type: ignore[assignment]
    named = {0: {f"all.{name}": each for name, each in specs.items()}}
    blocks = [FsdpUnit("all", model["all"], 0, in_backward=False)]
    return Buffers(
        model, named, comm, torch.float32, CPU, bucket_bytes, sharding=sharding(zero_stage), units=blocks, **options
    )


@settings(deadline=None)
@given(
    shapes=SHAPES,
    decay=st.lists(st.booleans(), min_size=8, max_size=8),
    bucket_bytes=st.floats(1, 400),
    zero_stage=st.integers(0, 3),
    ranks=st.integers(1, 5),
)
def test_ranks_hold_every_element_once(
    shapes: list[tuple[int, int]], decay: list[bool], bucket_bytes: float, zero_stage: int, ranks: int
) -> None:
    specs = {str(i): spec(str(i), *s, decay=d) for i, (s, d) in enumerate(zip(shapes, decay, strict=False))}
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", ranks)))
    times = {f"all.{name}": torch.zeros(shapes[int(name)]).flatten() for name in specs}
    for rank in range(ranks):
        buffers = build(specs, mesh.at(rank), zero_stage, bucket_bytes)
        for name, start, values in buffers.shards("main"):
            times[name][start : start + len(values)] += 1
        for flat in buffers.flat_buffers:
            spans = list(flat.spans.values())
            assert spans[0][0] == 0 and all(end == start for (_, end), (start, _) in pairwise(spans))
            assert flat.numel - (ranks if zero_stage else 1) < spans[-1][1] <= flat.numel
            assert flat.main.shape == flat.grad.shape == (flat.numel // (ranks if zero_stage else 1),)
            assert flat.grads_per_microbatch == len(flat.spans)
    copies = 1 if zero_stage and ranks > 1 else ranks
    assert all((count == copies).all() for count in times.values())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_long_shards_begin_at_aligned_addresses(zero_stage: int) -> None:
    """NCCL copies and AdamW's vectors are slow at others; the rest of the last shard is padding."""
    specs = {"w": spec("w", 301, 333), "b": spec("b", 7, decay=False)}
    mesh, held = Mesh((("pipeline", 1), ("replica", 1), ("data", 3))), 0
    for rank in range(3):
        (flat,) = build(specs, mesh.at(rank), zero_stage, bucket_bytes=1e6).flat_buffers
        assert len(flat.main) == 33_536 == 262 * 128 and flat.numel == 3 * 33_536
        assert flat.shard.start % 128 == 0 and len(flat.main) * 3 - flat.size < 3 * 128
        held += sum(where.stop - where.start for where in (flat.shard_range(name)[1] for name in flat.spans))
    assert held == flat.size == 301 * 333 + 7


@settings(deadline=None)
@given(shapes=SHAPES, decay=st.lists(st.booleans(), min_size=8, max_size=8), ranks=st.integers(1, 5))
def test_weight_decay_applies_to_its_parameters(shapes: list[tuple[int, int]], decay: list[bool], ranks: int) -> None:
    specs = {str(i): spec(str(i), *s, decay=d) for i, (s, d) in enumerate(zip(shapes, decay, strict=False))}
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", ranks)))
    for rank in range(ranks):
        (flat,) = build(specs, mesh.at(rank), 1, bucket_bytes=1e6).flat_buffers
        applies = torch.full((len(flat.main),), torch.nan)
        for decays, where in flat.runs(lambda name: decay[int(name[-1])]):
            applies[where] = decays
        assert not applies.isnan().any()
        for name in flat.spans:
            assert (applies[flat.shard_range(name)[1]] == decay[int(name[-1])]).all()


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), bucket_bytes=st.floats(1, 800))
def test_all_flat_buffers_but_the_first_fill_a_bucket(sizes: list[int], bucket_bytes: float) -> None:
    specs = {str(i): spec(str(i), size) for i, size in enumerate(sizes)}
    flats = build(specs, MESH, 0, bucket_bytes).flat_buffers
    assert all(4 * flat.size >= bucket_bytes for flat in flats[1:])
    assert [name for flat in flats for name in flat.spans] == [f"all.{name}" for name in specs]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_rank_may_hold_nothing_of_a_parameter(zero_stage: int) -> None:
    """The second of two ranks holds the last element of the first parameter and the whole second parameter."""
    specs = {"long": spec("long", 3), "short": spec("short", 1)}
    held = [
        {
            name: (start, len(values))
            for name, start, values in build(specs, MESH.at(rank), zero_stage, 64).shards("grad")
        }
        for rank in (0, 2)
    ]
    everything = {"all.long": (0, 3), "all.short": (0, 1)}
    shared = [{"all.long": (0, 2), "all.short": (0, 0)}, {"all.long": (2, 1), "all.short": (0, 1)}]
    assert held == (shared if zero_stage else [everything] * 2)


def test_a_shard_may_be_only_padding() -> None:
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", 4)), rank=3)
    buffers = build({"w": spec("w", 5)}, mesh, 1)
    assert [len(values) for _, _, values in buffers.shards("main")] == [0]
    assert buffers.flat_buffers[0].main.shape == (2,) and buffers.square_norm() == 0


def test_flat_buffers_differ_in_reduction_copies_and_links() -> None:
    mesh = Mesh((("pipeline", 3), ("replica", 1), ("data", 2), ("x", 2)))
    specs = {
        "matrix": spec("matrix", 4, 4, layout=(("x",), ())),
        "norm": spec("norm", 4, decay=False, token_axes=("data", "x")),
        "bias": spec("bias", 4, decay=False, layout=(("x",),)),
        "position": spec("position", 4),
        "other matrix": spec("other matrix", 2, 4, layout=((), ("x",))),
        "tied": spec("tied", 4, 4, layout=(("x",), ()), holders=(0, 2)),
    }
    flats = build(specs, mesh, 0).flat_buffers
    names = [["all.matrix", "all.other matrix", "all.bias"], ["all.norm"], ["all.position"], ["all.tied"]]
    wide = build(specs, mesh, 0, bucket_bytes=1e6).flat_buffers
    assert [list(flat.spans) for flat in wide] == names
    assert [flat.sync.reduce_axes for flat in wide] == [("data",), ("data", "x"), ("data",), ("data",)]
    assert [flat.sync.copies for flat in wide] == [2, 4, 4, 4]
    assert [flat.sync.link for flat in wide] == [None, None, None, Link("pipeline", 0, 2)]
    assert len(flats) == 6, "a bucket of one byte is one parameter"


def test_sharded_elements_have_no_copies_along_their_axes() -> None:
    mesh = Mesh((("pipeline", 1), ("replica", 3), ("data", 2), ("x", 2)))
    specs = {"matrix": spec("matrix", 4, 4, layout=(("x",), ())), "norm": spec("norm", 4, decay=False)}
    for zero_stage, copies in ((0, [6, 12]), (1, [3, 6]), (2, [3, 6]), (3, [3, 6])):
        assert [flat.sync.copies for flat in build(specs, mesh, zero_stage, 1e6).flat_buffers] == copies


def test_stages_and_fsdp_units_have_their_own_flat_buffers() -> None:
    comm: Any = Echo(MESH)
    for zero_stage, expected in (
        (2, [["0.weight", "1.weight"], ["2.weight"]]),
        (3, [["0.weight"], ["1.weight"], ["2.weight"]]),
    ):
        model = nn.ModuleList(parameters(0) for _ in range(3))
        for module in model:
            module["weight"] = nn.Parameter(torch.empty(4, device="meta"))  # type: ignore[operator]
        specs = {0: {f"{i}.weight": spec(str(i), 4) for i in (0, 1)}, 5: {"2.weight": spec("2", 4)}}
        blocks = [FsdpUnit(str(i), module, 0 if i < 2 else 5, False) for i, module in enumerate(model)]
        shared = sharding(zero_stage)
        flats = Buffers(model, specs, comm, torch.float32, CPU, 1e6, sharding=shared, units=blocks).flat_buffers
        assert [list(flat.spans) for flat in flats] == expected
        assert [flat.stage for flat in flats][-1] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_fp32_models_have_one_copy_of_the_weights(dtype: torch.dtype, zero_stage: int) -> None:
    _, buffers, _ = chain(count=1, size=4, zero_stage=zero_stage, dtype=dtype)
    (flat,) = buffers.flat_buffers
    assert flat.is_view and flat.main.untyped_storage().data_ptr() == flat.params.untyped_storage().data_ptr()
    assert flat.main.data_ptr() == flat.params[flat.shard].data_ptr() and flat.grad.dtype == flat.main.dtype == dtype


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_bf16_model_has_fp32_gradients_and_master_weights(zero_stage: int) -> None:
    model, buffers, _ = chain(count=1, size=2, zero_stage=zero_stage, dtype=torch.bfloat16)
    (flat,) = buffers.flat_buffers
    assert (flat.main.dtype, flat.params.dtype, flat.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    gradients = [1.0] + [2.0**-9] * 64
    fill_main(buffers, 1.0)
    buffers.begin_step(len(gradients))
    for value in gradients:
        model(torch.full((2,), value, dtype=torch.bfloat16)).sum().backward()
    buffers.reduce_grads()
    assert set(flat.grad.tolist()) == {2 * 1.125}, "a bf16 sum would have stayed at 2"
    for value, seen in ((1 + 2.0**-12, 1.0), (1 + 2.0**-7, 1 + 2.0**-7)):
        fill_main(buffers, value)
        assert set(flat.main.tolist()) == {value}
        with torch.no_grad():
            assert set(model(torch.ones(2, dtype=torch.bfloat16)).tolist()) == {seen}


@pytest.mark.parametrize("zero_stage,weights,gradients", [(0, 40, 40), (1, 40, 40), (2, 40, 20), (3, 20, 20)])
def test_bytes_of_weights_and_gradients(zero_stage: int, weights: int, gradients: int) -> None:
    """Nine elements in fp32 over two ranks are ten with padding."""
    _, buffers, _ = chain(count=1, size=9, zero_stage=zero_stage)
    padding = 4 if zero_stage == 0 else 0
    assert buffers.flat_buffers[0].nbytes == {"weights": weights - padding, "gradients": gradients - padding}


def test_one_rank_shards_nothing() -> None:
    assert [Sharding.of_stage(stage, ()) for stage in range(4)] == [Sharding()] * 4
