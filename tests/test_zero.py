"""Fact: every parameter lies in one bucket; a bucket is summed once per step, as soon as its last gradient of the last
microbatch is there, under the rest of backward; sums are wide; the norm counts each logical element once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron3d.comm import Pending, ProcessComm
from megatron3d.layout import ParamSpec, Part
from megatron3d.mesh import Axes, Mesh
from megatron3d.zero import Buffers, square_sum

CPU = torch.device("cpu")
MESH = Mesh((("pipeline", 3), ("data", 2), ("x", 2)))
ALONE = Mesh((("pipeline", 1), ("data", 1), ("x", 1)))


class Echo:
    """A communicator whose other ranks hold the same numbers; writes down when a sum begins and ends."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.events: list[Any] = []

    def all_reduce(self, x: Tensor, axes: Axes) -> Pending:
        self.events.append(("begin", axes, x.numel()))

        def finish() -> Tensor:
            self.events.append(("end", axes, x.numel()))
            return x.mul_(self.mesh.size(axes))

        return Pending(finish)


class Scale(nn.Module):
    """x * weight, and a note when its backward begins."""

    def __init__(self, size: int, name: str, events: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.name, self.events = name, events

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(lambda dy: self.events.append(f"backward of {self.name}"))
        return y


def spec(name: str, *shape: int, layout: tuple[Axes, ...] | None = None, **fields: Any) -> ParamSpec:
    values = {"token_axes": ("data",), "layout": layout or ((),) * len(shape)} | fields
    return ParamSpec((Part(name, shape, shape),), **values)


def chain(count: int, size: int, bucket_bytes: float, dtype: torch.dtype = torch.float32) -> tuple[Any, Buffers, Echo]:
    """`count` scales behind each other."""
    comm: Any = Echo(MESH)
    model = nn.Sequential(*(Scale(size, str(i), comm.events) for i in range(count)))
    specs = {f"{i}.weight": spec(str(i), size) for i in range(count)}
    return model, Buffers(model, {0: specs}, comm, dtype, CPU, bucket_bytes), comm


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8),
    decay=st.lists(st.booleans(), min_size=8, max_size=8),
    bucket_bytes=st.floats(1, 400),
)
def test_every_parameter_lies_in_one_bucket(
    shapes: list[tuple[int, int]], decay: list[bool], bucket_bytes: float
) -> None:
    model = nn.ParameterDict({str(i): nn.Parameter(torch.empty(s, device="meta")) for i, s in enumerate(shapes)})
    specs = {str(i): spec(str(i), *s, decay=d) for i, (s, d) in enumerate(zip(shapes, decay, strict=False))}
    comm: Any = Echo(MESH)
    buffers = Buffers(model, {0: specs}, comm, torch.float32, CPU, bucket_bytes)
    for flat in buffers.flats:
        addresses = [(b.grad.data_ptr(), b.grad.data_ptr() + b.grad.nbytes) for b in flat.buckets[::-1]]
        assert addresses[0][0] == flat.grad.data_ptr()
        assert addresses[-1][1] == flat.grad.data_ptr() + flat.grad.nbytes
        assert all(end == start for (_, end), (start, _) in pairwise(addresses))
        assert sum(bucket.num_uses for bucket in flat.buckets) == len(flat.spans)
        assert all(bucket.grad.nbytes >= bucket_bytes for bucket in flat.buckets[:-1])
    assert sorted(name for name, _, _ in buffers.named("grad")) == sorted(specs)
    for number, (name, _, view) in enumerate(buffers.named("main")):
        view.fill_(number)
        assert model[name].shape == shapes[int(name)]
        assert (model[name] == number).all(), "the network does not see its flat buffer"


def test_a_bucket_is_summed_under_the_backward_of_earlier_layers() -> None:
    model, buffers, comm = chain(count=3, size=4, bucket_bytes=1)
    buffers.begin_step(1)
    model(torch.ones(4)).sum().backward()
    buffers.reduce_grads()
    begin, end = ("begin", ("data",), 4), ("end", ("data",), 4)
    backward = [f"backward of {i}" for i in (2, 1, 0)]
    assert comm.events == [backward[0], begin, backward[1], begin, backward[2], begin, end, end, end]


def test_a_bucket_of_several_waits_for_the_last_of_them() -> None:
    model, buffers, comm = chain(count=4, size=4, bucket_bytes=32)
    buffers.begin_step(1)
    model(torch.ones(4)).sum().backward()
    assert [e for e in comm.events if e[0] == "begin"] == [("begin", ("data",), 8)] * 2
    assert comm.events.index(("begin", ("data",), 8)) == comm.events.index("backward of 2") + 1


def test_microbatches_are_added_and_reduced_once() -> None:
    model, buffers, comm = chain(count=2, size=1, bucket_bytes=1)
    for _, _, view in buffers.named("main"):
        view.fill_(2.0)
    for _ in range(2):
        comm.events.clear()
        buffers.begin_step(3)
        for index, value in enumerate((1.0, 10.0, 100.0)):
            model(torch.full((1,), value)).sum().backward()
            begun = sum(event[0] == "begin" for event in comm.events)
            assert begun == (2 if index == 2 else 0)
        buffers.reduce_grads()
        assert [view.item() for _, _, view in buffers.named("grad")] == [2 * 2 * 111.0] * 2
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_never_comes_is_an_error() -> None:
    model, buffers, _ = chain(count=2, size=1, bucket_bytes=1)
    buffers.begin_step(1)
    model[1](torch.ones(1)).sum().backward()
    with pytest.raises(AssertionError, match="1 gradients of a bucket never arrived"):
        buffers.reduce_grads()


def test_a_parameter_used_twice_arrives_once() -> None:
    model, buffers, comm = chain(count=1, size=1, bucket_bytes=1)
    for _, _, view in buffers.named("main"):
        view.fill_(3.0)
    buffers.begin_step(1)
    model[0](model[0](torch.ones(1))).sum().backward()
    buffers.reduce_grads()
    assert [view.item() for _, _, view in buffers.named("grad")] == [2 * 6.0]
    assert sum(event[0] == "begin" for event in comm.events) == 1


def test_the_norm_counts_every_logical_element_once() -> None:
    """Summed over the ranks of a pipeline stage, whatever is copied; stages hold different parameters."""
    specs = {
        "whole": spec("whole", 4),
        "split": spec("split", 6, layout=(("x",),)),
        "undecayed": spec("undecayed", 2, decay=False),
    }
    total = 0.0
    values = {"whole": torch.arange(4.0), "split": torch.arange(6.0) + 10, "undecayed": torch.tensor([5.0, 7.0])}
    for rank in range(4):
        comm: Any = Echo(MESH.at(rank))
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(0, device="meta")) for name in specs})
        buffers = Buffers(model, {0: specs}, comm, torch.float32, CPU, 1)
        for name, _, view in buffers.named("grad"):
            view.copy_(values[name].chunk(2)[rank % 2] if name == "split" else values[name])
        total += buffers.square_norm().item()
    assert total == sum(value.square().sum().item() for value in values.values())


def test_kinds_differ_in_sums_copies_and_decay() -> None:
    specs = {
        "matrix": spec("matrix", 4, 4, layout=(("x",), ())),
        "norm": spec("norm", 4, decay=False, token_axes=("data", "x")),
        "bias": spec("bias", 4, decay=False),
        "other matrix": spec("other matrix", 2, 4, layout=((), ("x",))),
    }
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(0, device="meta")) for name in specs})
    comm: Any = Echo(MESH)
    flats = Buffers(model, {0: specs}, comm, torch.float32, CPU, 1).flats
    assert [list(flat.spans) for flat in flats] == [["matrix", "other matrix"], ["norm"], ["bias"]]
    assert [flat.kind.reduce_axes for flat in flats] == [("data",), ("data", "x"), ("data",)]
    assert [flat.kind.copies for flat in flats] == [2, 4, 4]


def test_a_bf16_network_has_fp32_sums_and_an_fp32_copy() -> None:
    model, buffers, _ = chain(count=1, size=1, bucket_bytes=1, dtype=torch.bfloat16)
    (flat,) = buffers.flats
    assert (flat.main.dtype, flat.model.dtype, flat.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    gradients = [1.0] + [2.0**-9] * 64
    buffers.begin_step(len(gradients))
    for value in gradients:
        model(torch.full((1,), value, dtype=torch.bfloat16)).sum().backward()
    assert flat.grad.item() == 1.125, "a bf16 sum would have stayed at 1"
    flat.main.fill_(1 + 2.0**-12)
    buffers.publish()
    assert model[0].weight.item() == 1.0 and flat.main.item() == 1 + 2.0**-12
    flat.main.fill_(1 + 2.0**-7)
    buffers.publish()
    assert model[0].weight.item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_networks_have_one_copy(dtype: torch.dtype) -> None:
    comm = ProcessComm(ALONE, [])
    model = nn.Sequential(Scale(3, "0", []))
    (flat,) = Buffers(model, {0: {"0.weight": spec("w", 3)}}, comm, dtype, CPU, 1).flats
    assert flat.main is flat.model and flat.grad.dtype == flat.main.dtype == dtype


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5_000_000])
def test_a_long_norm_is_as_exact_as_a_short_one(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    expected = values.double().square().sum()
    assert (square_sum(values).double() / expected - 1).abs() < 1e-6
