"""Fact: the groups that NCCL may give as many multiprocessors as it likes are those that no GEMM runs next to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common.loopback import LoopbackComm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.comm.interface import Pending
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches
from tests.support.equality import MODELS, VOCAB_SIZE, configure
from tests.support.layout_rows import ROWS, build, name_of, pick

FACTORS = ("overlap", "dispatcher")
PLACES = pick([frozenset((name, row[name]) for name in FACTORS) for row in ROWS])
COLLECTIVES = (
    "all_gather",
    "all_gather_into",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_rows",
    "shift",
)
GEMMS = ("mm", "bmm", "addmm", "baddbmm", "_linear_pointwise", "linear")


class _Gemms(TorchDispatchMode):
    """Counts GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in GEMMS
        return func(*args, **(kwargs or {}))


class _Watched(LoopbackComm):
    """Communicator that notes over which axes a collective was in flight during a GEMM, and over which none was."""

    def __init__(self, mesh: Mesh, gemms: _Gemms) -> None:
        super().__init__(mesh)
        self._gemms = gemms
        self.overlapped, self.used = set[Axes](), set[Axes]()

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        if name not in COLLECTIVES:
            return call

        def watched(*args: Any, **kwargs: Any) -> Pending:
            (axes,) = (each for each in args if isinstance(each, tuple) and all(isinstance(part, str) for part in each))
            live, pending = self.mesh.nontrivial(self.mesh.in_order(axes)), call(*args, **kwargs)
            begun = self._gemms.count
            self.used.add(live)

            def finish() -> Tensor:
                self.overlapped |= {live} if live and self._gemms.count > begun else set()
                return pending.wait()

            return Pending(finish)

        return watched


def watched_step(spec: RunSpec) -> _Watched:
    """Return the communicator of one step of a rank whose tensors have no values."""
    with FakeTensorMode(), _Gemms() as gemms:
        comm = _Watched(spec.mesh, gemms)
        state = build_state(spec, comm, torch.device("cpu"), has_values=False)
        batch, train = microbatches(spec), spec.config.train
        num_tokens = train.global_batch_size * state.model.arch.seq_length
        settings = StepSettings(train.seed, num_tokens, train.global_batch_size, spec.packing(0))
        train_step(state, batch, 1e-4, settings)
    return comm


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_no_gemm_runs_during_the_collectives_of_an_exposed_group(place: int, tmp_path: Path) -> None:
    _, config, num_ranks = build(ROWS[place], tmp_path)
    spec = RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)
    assert set(spec.exposed_axes) <= set(spec.parallel_state.group_axes)
    assert watched_step(spec).overlapped.isdisjoint(spec.exposed_axes)


DENSE = {**next(iter(MODELS.values())), "num_layers": 1}
SHARED = {"moe_shared_expert_intermediate_size": 16}
EXPERTS = next(keys for keys in MODELS.values() if "num_moe_experts" in keys and SHARED.keys().isdisjoint(keys))
EXPERTS = {**EXPERTS, "num_layers": 2, "moe_layer_freq": 1}
OVER_DATA = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
IN_3D = {"tensor_parallel_mode": "3d", "tensor_parallel_form": "tokens", "tensor_parallel_shape": (2, 2, 2)}
NO_OVERLAP = {f"tp_comm_overlap_{name}": False for name in ("input_grad", "weight_grad", "weight_gather")}
SPLIT = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, Axes, bool]] = {
    "dX is reduced during the wgrad GEMM": (DENSE, {"tensor_model_parallel_size": 2}, 2, ("t",), False),
    "W is prefetched": (DENSE, IN_3D, 8, ("x",), False),
    "W is gathered when it is needed": (DENSE, IN_3D | NO_OVERLAP, 8, ("x",), True),
    "rows are sent on their own": (EXPERTS, OVER_DATA, 4, ("data.1",), True),
    "rows are sent during the shared experts": (EXPERTS | SHARED, OVER_DATA, 4, ("data.1",), False),
    "tokens are gathered for the shards of experts": (EXPERTS, SPLIT, 4, ("t.1",), True),
}


@pytest.mark.parametrize("what", CASES)
def test_a_group_is_exposed_where_nothing_overlaps_with_what_it_moves(what: str) -> None:
    model, parallel, num_ranks, axes, is_exposed = CASES[what]
    spec = RunSpec(configure(model, parallel, micro_batch_size=4, global_batch_size=16), num_ranks, VOCAB_SIZE)
    found = watched_step(spec)
    assert axes in found.used
    assert is_exposed == (axes in spec.exposed_axes) == (axes not in found.overlapped)
