"""Fact: collectives in rounds with a GEMM give the product of the gathered rows, and the scattered sum of products.

They do so over gloo, through host memory with a lag, and between ranks that take turns; transfers are in flight during
the GEMMs, sums repeat bit for bit, and nothing is multiplied before it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory
from common.loopback import LoopbackComm
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.host_comm import HostComm, LaggingComm
from megatron3d.comm.interface import Comm, Pending
from megatron3d.comm.matmul_rounds import MAX_IN_FLIGHT
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.comm.recording import Recorder
from megatron3d.linear.gemm import put_product
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.pool import Pool
from tests.support.shards import error, normal, pretended_world
from tests.support.turn_ranks import TurnComm, TurnPending, make_comm, run_turns

AXES = (("x", 2), ("one", 1), ("y", 2))
SETS: list[Axes] = [("x",), ("y",), ("x", "y"), ("y", "x")]
M, N, K = 8, 12, 5


def on_processes(mesh: Mesh) -> Comm:
    return make_comm(mesh, SETS[:3])


def through_host_memory(mesh: Mesh) -> Comm:
    return HostComm(make_comm(mesh, SETS[:3]))


def lagging(mesh: Mesh) -> Comm:
    return LaggingComm(ProcessComm(mesh, SETS[:3]), 0.002)


def operands(rank: int) -> tuple[Tensor, Tensor]:
    return normal(M, K, seed=rank), normal(N, K, seed=100 + rank)


def wrong(rank: int, world_size: int, make: Callable[[Mesh], Comm]) -> list[str]:
    """Return the verbs whose results are not those of the plain collective and one GEMM."""
    mesh, found = Mesh(AXES, rank), []
    comm = make(mesh)
    for axes in SETS:
        others, mine = mesh.ranks(axes), mesh.index(axes)
        (a, b), ranks = operands(rank), len(others)
        rows = torch.cat([operands(other)[0] for other in others])
        got = comm.all_gather_matmul(a.T.contiguous().T, b, axes, put_product)
        if not torch.equal(got.rows, rows) or not error(got.product, rows @ b.T) < 1e-14:
            found.append(f"rank {rank}: all_gather_matmul over {axes}")
        total = torch.stack([x @ y.T for x, y in map(operands, others)]).sum(0)
        for dim in (0, 1):
            parts = [comm.matmul_reduce_scatter(a, b, axes, dim, put_product).wait() for _ in range(2)]
            if not error(parts[0], total.chunk(ranks, dim)[mine]) < 1e-14 or not torch.equal(*parts):
                found.append(f"rank {rank}: matmul_reduce_scatter over {axes} along {dim}")
        for by in (1, 3):
            out = comm.shift(b, torch.zeros_like(b), axes, by).wait()
            if not torch.equal(out, operands(others[(mine - by) % ranks])[1]):
                found.append(f"rank {rank}: shift over {axes} by {by}")
    return found


def test_verbs_give_the_numbers_of_the_plain_collective(pool: Pool) -> None:
    right: list[list[str]] = [[]] * 4
    assert run_turns(wrong, 4, on_processes) == run_turns(wrong, 4, through_host_memory) == right
    assert pool.run(wrong, 4, on_processes) == pool.run(wrong, 4, lagging) == right


def sums(rank: int, world_size: int) -> list[list[float]]:
    """Return one sum of terms that cancel, whose order decides the rounding, along both dims."""
    comm = on_processes(Mesh((("x", world_size),), rank))
    term = torch.full((world_size, world_size), (1e16, 1.0, -1e16, 1.0)[rank])
    parts = [
        comm.matmul_reduce_scatter(term.double(), torch.eye(world_size).double(), ("x",), dim, put_product).wait()
        for dim in (0, 1)
    ]
    return [part.flatten().tolist() for part in parts]


def test_all_ranks_add_in_the_same_order() -> None:
    for found in run_turns(sums, 4):
        assert found == run_turns(sums, 4)[0] and len({*found[0], *found[1]}) == 1


class Diary(LoopbackComm):
    """Log the start and the wait of shifts; `put` logs GEMMs."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.events = list[str]()

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        self.events.append("begin")
        pending = super().shift(x, out, axes, by)
        return Pending(lambda: (self.events.append("end"), pending.wait())[1])

    def put(self, into: Tensor, a: Tensor, b: Tensor) -> None:
        self.events.append("multiply")
        put_product(into, a, b)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_transfer_is_in_flight_during_a_gemm(ranks: int) -> None:
    comm = Diary(Mesh((("x", ranks),), 1))
    a, b = torch.ones(8, 3), torch.ones(8, 3)
    comm.all_gather_matmul(a, b, ("x",), comm.put)
    before, after = ["begin"] * (ranks - 1), ["end", "multiply"] * (ranks - 1)
    assert comm.events == [*before, "multiply", *after], "all start before the first GEMM, which needs none of them"
    comm.events.clear()
    comm.matmul_reduce_scatter(a, b, ("x",), 0, comm.put).wait()
    now = most = gemms_in_flight = 0
    for event in comm.events:
        now += {"begin": 1, "end": -1}.get(event, 0)
        most, gemms_in_flight = max(most, now), gemms_in_flight + (event == "multiply" and now > 0)
    assert gemms_in_flight == comm.events.count("begin") == ranks - 1 and most <= MAX_IN_FLIGHT


def test_recorded_bytes_are_those_of_the_plain_collectives() -> None:
    with pretended_world(0, 4):
        recorder = Recorder(on_processes(Mesh(AXES)))
        a, b = torch.ones(M, K), torch.ones(N, K)
        recorder.all_gather_matmul(a, b, ("x", "y"), put_product)
        recorder.matmul_reduce_scatter(a, b, ("x", "y"), 1, put_product).wait()
        recorder.all_gather_matmul(a, b, ("one",), put_product)
        recorder.shift(a, torch.empty_like(a), ("y",), 1).wait()
    assert recorder.calls == [
        Traffic("all_gather_matmul", ("x", "y"), 3 * a.nbytes),
        Traffic("matmul_reduce_scatter", ("x", "y"), 3 / 4 * M * N * 4),
        Traffic("shift", ("y",), a.nbytes),
    ]


def test_a_looped_rank_repeats_its_rows() -> None:
    comm, (a, b) = LoopbackComm(Mesh((("x", 2),))), operands(0)
    got = comm.all_gather_matmul(a, b, ("x",), put_product)
    assert torch.equal(got.rows, torch.cat((a, a))) and got.product.shape == (2 * M, N)
    assert comm.matmul_reduce_scatter(a, b, ("x",), 0, put_product).wait().shape == (M // 2, N)


def test_parts_that_do_not_divide_are_refused() -> None:
    comm = LoopbackComm(Mesh((("x", 3),)))
    with pytest.raises(AssertionError, match=r"8 x 12 along 0 does not divide by \('x',\)=3 ranks"):
        comm.matmul_reduce_scatter(*operands(0), ("x",), 0, put_product)


def gathered(rank: int, world_size: int) -> float:
    a, b = operands(rank)
    return (
        on_processes(Mesh((("x", world_size),), rank)).all_gather_matmul(a, b, ("x",), put_product).product.sum().item()
    )


def test_rows_that_are_multiplied_before_they_arrive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TurnComm.shift

    def early(self: TurnComm, *args: Any) -> Pending:
        pending = original(self, *args)
        assert isinstance(pending, TurnPending), "ranks take turns"
        return Pending(lambda: pending.memory)

    monkeypatch.setattr(TurnComm, "shift", early)
    assert all(value != value for value in run_turns(gathered, 2)), "a product of rows in flight is not a number"


@pytest.mark.parametrize(
    ("votes", "shared"),
    [
        ([[5, -5, 0], [5, -5, 0]], True),
        ([[5, -5, 0], [6, -6, 0]], False),
        ([[5, -5, 0], [5, -5, 1]], False),
        ([[0, 0, 0], [0, 0, 0]], False),
    ],
)
def test_symmetric_memory_is_used_inside_one_node_only(votes: list[list[int]], shared: bool) -> None:
    """Ranks agree by the maximum over the group; without a node's identity nothing is shared."""
    assert matmul_rounds.is_shared([max(column) for column in zip(*votes, strict=True)]) == shared


def test_cpus_share_no_symmetric_memory() -> None:
    node, minus, cannot = matmul_rounds.votes(torch.device("cpu"))
    assert node == -minus and cannot


@pytest.mark.parametrize(("num_visible", "far", "shared"), [(1, (), False), (4, (), True), (4, (3,), False)])
def test_gpus_share_symmetric_memory_if_each_reads_all_others(
    num_visible: int, far: tuple[int, ...], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that sees its own GPU alone would say so of none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other not in far)
    _, _, cannot = matmul_rounds.votes(torch.device("cuda", 0))
    assert cannot != shared


class Fallbacks:
    """torch's own plain forms of its fused operators, with their signatures."""

    fused_all_gather_matmul = staticmethod(torch_symmetric_memory._fused_all_gather_matmul_fallback)
    fused_matmul_reduce_scatter = staticmethod(torch_symmetric_memory._fused_matmul_reduce_scatter_fallback)


def wrong_fused(rank: int, world_size: int) -> list[str]:
    """Return the fused verbs whose results differ from the rounds, with torch's plain forms for its kernels."""
    comm, (a, b), found = ProcessComm(Mesh((("x", world_size),), rank), [("x",)]), operands(rank), []
    group = dist.distributed_c10d._get_default_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_rounds, "_operators", Fallbacks)
        fused, rounds = (
            matmul_rounds.fused_all_gather_matmul(a, b, group),
            comm.all_gather_matmul(a, b, ("x",), put_product),
        )
        if not torch.equal(fused.rows, rounds.rows) or not error(fused.product, rounds.product) < 1e-14:
            found.append("all_gather_matmul")
        for dim in (0, 1):
            part = matmul_rounds.fused_matmul_reduce_scatter(a, b, dim, group)
            if not error(part, comm.matmul_reduce_scatter(a, b, ("x",), dim, put_product).wait()) < 1e-14:
                found.append(f"matmul_reduce_scatter along {dim}")
    return found


def test_fused_operators_are_called_as_torch_declares_them(pool: Pool) -> None:
    """A GPU only replaces the plain forms by kernels; torch declares both alike."""
    assert pool.run(wrong_fused, 2) == [[]] * 2
    operators = matmul_rounds._operators()
    gather, scatter = (
        str(getattr(operators, name).default._schema)
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    )
    assert "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)" in gather
    assert "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor" in scatter
