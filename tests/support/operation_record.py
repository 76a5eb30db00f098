"""Compare each operation of the lists of a rank's stages with what these do: order, GEMMs, collectives, storages.

One microbatch runs forward and backward with fake tensors.  A kernel, a collective or a storage belongs to the module
whose forward runs; in backward to the module that created the node of autograd that runs.  An operation belongs to the
innermost module on the path that is its name, so that what attention does between its linears is compared together.
Weights are not prefetched and ZeRO shards nothing, since operations know of neither.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from common.loopback import LoopbackComm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.activations import modules_of
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.linear.overlap_plan import in_rounds
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.microbatch import Pass
from megatron3d.model.operation import Operation, Stored, kept_by
from megatron3d.model.operations import ahead_operations, embedding_operations, head_operations, layer_operations
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes
from megatron3d.train.state import build_state
from megatron3d.verify.dry_run import microbatches, tensors_by_kind
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter

FORWARD, BACKWARD = "forward", "backward"
Gemm = tuple[int, int, int]  # rows and columns of the product, the smaller first, and the size that is summed


@dataclass
class Work:
    """Work of a module, or of its operations, in one direction; backward includes recomputation.

    Attributes:
        gemms: sizes of GEMMs of two matrices, and how many have them.
        kept: bytes of the storages that backward needs and that no module before needs.
        written: bytes of the storages that are made here and that other modules read.
    """

    flops: int = 0
    gemms: Counter[Gemm] = field(default_factory=Counter)
    calls: Counter[Traffic] = field(default_factory=Counter)
    kept: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


class _Calls(list[Traffic]):
    """List of collectives that passes each one on."""

    def __init__(self, note: Callable[[Traffic], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, call: Traffic) -> None:
        self._note(call)
        super().append(call)


class ModuleRecord(FlopMemoryMeter):
    """Records the work of each module of a model while it is active.

    Args:
        known: tensors that belong to no module.

    Attributes:
        work: by direction and path of the module.
        order: modules in the order in which forward makes their first storage.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.work: dict[tuple[str, str], Work] = {}
        self.order = dict[str, None]()
        self._known, self._stack, self._direction = set(self._live), [""], FORWARD
        self._marks: list[tuple[int, str]] = [(-1, "")]
        self._storages: dict[int, _Storage] = {}
        self._every = list[_Storage]()
        self.modules = [path for path, _ in model.named_modules()]
        for path, module in model.named_modules():
            if path:
                self._watch(path, module)
        recorder.calls = _Calls(self._call)

    def _watch(self, path: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            self._stack.append(path)
            self._mark(path)

        def leave(*_: Any) -> None:
            self._stack.pop()
            self._mark(self._stack[-1])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _mark(self, path: str) -> None:
        """Note that the nodes of autograd from here on belong to a module."""
        self._marks.append((torch.autograd._get_sequence_nr(), path))  # type: ignore[attr-defined]

    @property
    def where(self) -> str:
        """Path of the module that is computed."""
        node = torch._C._current_autograd_node() if len(self._stack) == 1 else None
        if node is None:
            return self._stack[-1]
        _, path = self._marks[bisect.bisect(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1]
        if self._marks[-1][1] != path:
            self._mark(path)
        return path

    def _here(self) -> Work:
        return self.work.setdefault((self._direction, self.where), Work())

    def _call(self, call: Traffic) -> None:
        self._here().calls[_rounded(call)] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.flops
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.flops != before:
            here = self._here()
            here.flops += self.flops - before
            here.gemms.update(_gemm(func, args))
        if self._direction == FORWARD and func._overloadpacket is not torch.ops.aten.detach:  # which makes nothing
            self._follow(args, out)
        return out

    def _follow(self, args: Any, out: Any) -> None:
        """Note which module makes a storage, and which others read it."""
        where = self.where
        read = [found for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and (found := self._storage(leaf))]
        for found in read:
            found.readers.setdefault(where)
        for leaf in tree_leaves(out):
            found = self._storage(leaf) if isinstance(leaf, Tensor) else None
            if found and not found.made_by and found not in read:  # a view makes nothing
                found.made_by.append(where)
                self.order.setdefault(where)

    def _storage(self, tensor: Tensor) -> _Storage | None:
        """Return the record of a storage; None of one that is known, or empty."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return None
        found = self._storages.get(key)
        if found is None or found.ref is not self._live.get(key):  # another storage may have had its address
            self._add(tensor)
            found = self._storages[key] = _Storage(self._live[key], storage.nbytes())
            self._every.append(found)
        return found

    def _save(self, saved: Tensor) -> Tensor:
        if found := self._storage(saved):
            found.savers.setdefault(self.where)
        return saved

    def run(self, forward: Callable[[], Tensor], x_MH: Tensor | None) -> None:
        """Run forward and backward of a stage with this input."""
        self._direction, self._every = FORWARD, list[_Storage]()
        given = None if x_MH is None else self._storage(x_MH)
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved):
            y = forward()
        self._attribute(y.untyped_storage(), given)
        self._direction = BACKWARD
        y.backward(torch.ones_like(y))

    def _attribute(self, result: torch.UntypedStorage, given: _Storage | None) -> None:
        """Attribute what lives to the first module that needs it, and what others read to the one that makes it.

        What the model itself makes is shared by its layers; what exists before counts if autograd saves it.
        """
        for each in self._every:
            maker = each.made_by[0] if each.made_by else None
            others = [path for path in each.readers if path != maker]
            if maker and others:
                self._work(FORWARD, maker).written.append(each.num_bytes)
            is_left = (maker is not None and each.ref() is not result) or each is given
            needs = next(iter([*each.savers, *(others if is_left else ())]), "")
            if maker != "" and needs and each.ref() is not None:
                self._work(FORWARD, needs).kept.append(each.num_bytes)

    def _work(self, direction: str, path: str) -> Work:
        return self.work.setdefault((direction, path), Work())


class _Storage:
    """A storage of forward, with the modules that make, read and save it."""

    def __init__(self, ref: Any, num_bytes: int) -> None:
        self.ref, self.num_bytes = ref, num_bytes
        self.made_by = list[str]()
        self.readers, self.savers = dict[str, None](), dict[str, None]()


def _rounded(call: Traffic) -> Traffic:
    return call._replace(wire_bytes=round(call.wire_bytes))


def _gemm(func: Any, args: Sequence[Any]) -> Iterator[Gemm]:
    """Yield the sizes of a GEMM of two matrices; other kernels have FLOPs alone."""
    aten, kernel = torch.ops.aten, func._overloadpacket
    matrices = [each.shape for each in args if isinstance(each, Tensor) and each.dim() == 2]
    if kernel is torch.ops.mkldnn._linear_pointwise:
        (m, k), (n, _) = matrices[:2]
        yield min(m, n), max(m, n), k
    elif kernel in (aten.mm, aten.addmm, aten.addmm_):
        (m, k), (_, n) = matrices[-2:]
        yield min(m, n), max(m, n), k


class Listed(NamedTuple):
    """An operation of a list, with the module that it belongs to.

    Attributes:
        path: its name in the whole model; `module`: path of its module.
        again: whether backward recomputes it, and with which collectives.
    """

    path: str
    module: str
    operation: Operation
    local: LocalSizes
    kept: Sequence[Stored]
    again: Sequence[Traffic] | None

    def work(self, direction: str) -> Work:
        """Return what the list says of it."""
        each, matmul = self.operation, self.operation.matmul
        calls = list(each.sent if direction == FORWARD else [*(self.again or ()), *each.sent_back])
        gemms = list[Gemm]()
        if matmul is not None and not each.chunks:
            calls += self._linear_calls(direction)
            m, n, k = map(round, matmul.multiplied(self.local.mesh))
            forward, backward = [(m, n, k)], [(m, k, n), (n, k, m)]
            chosen = forward if direction == FORWARD else backward + forward * (self.again is not None)
            gemms = [(min(gemm[:2]), max(gemm[:2]), gemm[2]) for gemm in chosen] * (not self.local.overlap.in_rounds)
        again_flops = 0 if self.again is None else each.flops_again(modules_of(self.local))
        flops = each.flops if direction == FORWARD else each.backward_flops + again_flops
        if each.chunks:  # forward computes the gradients
            whole = each.flops + each.backward_flops
            flops = whole if direction == FORWARD else whole * (self.again is not None)
        kept = [stored.num_bytes for stored in self.kept] if direction == FORWARD else []
        written = [stored.num_bytes for stored in each.writes] if direction == FORWARD else []
        return Work(flops, Counter(gemms), Counter(map(_rounded, calls)), kept, written)

    def _linear_calls(self, direction: str) -> list[Traffic]:
        """Return the collectives of a linear, whose wgrad hides the reduction of dX unless rounds do."""
        local, matmul = self.local, self.operation.matmul
        assert matmul is not None, f"{self.path} is a linear"
        sent = self.operation.flows(local)
        named = in_rounds(sent, matmul.plan) if local.overlap.in_rounds else sent
        forward = [*sent.scales, *named.gather_x, *named.reduce_y]
        if direction == FORWARD:
            return forward + sent.gather_w
        again = self.again is not None
        reduced = sent.reduce_dx if local.overlap.input_grad else named.reduce_dx
        gathers_w = (not local.overlap.keep_gathered_weights) * (again * sent.gather_w + sent.w_again)
        gathers = [*sent.scales_back, *named.gather_dy, *sent.x_again]
        return again * forward + gathers_w + gathers + reduced + sent.reduce_dw


def listed_operations(step: StepSpec, modules: Iterable[str]) -> Iterator[Listed]:
    """Yield the operations of this rank's stages in the order of forward."""
    local, known = step.local, set(modules)

    def located(
        prefix: str, operations: Sequence[Operation], sizes: LocalSizes, is_recomputed: bool, is_last: bool = False
    ) -> Iterator[Listed]:
        chosen, last = modules_of(sizes), len(operations)
        if is_recomputed and is_last:  # recomputation stops behind what is saved last
            last = max(place for place, each in enumerate(operations) if each.saves)
        for place, (each, kept) in enumerate(kept_by(operations, chosen)):
            path = prefix + each.name
            names = path.split(".")
            parents = (".".join(names[:length]) for length in range(len(names), 0, -1))
            module = next((parent for parent in parents if parent in known), "")
            again = None
            if each.is_again(chosen) or (is_recomputed and place <= last):
                again = each.sent_again(chosen)
            yield Listed(path, module, each, sizes, kept, again)

    for stage in step.stages:
        if stage.has_embedding:
            yield from located("", embedding_operations(local), local, False)
        for run in local.recompute.runs(stage.layers):
            for layer in run.layers:
                sizes = replace(local, layer=layer)
                yield from located(
                    f"layers.{layer}.", layer_operations(sizes), sizes, run.is_recomputed, layer == run.layers[-1]
                )
        if stage.has_head:
            yield from located("", head_operations(local), local, False)
        for index in range(local.arch.mtp_num_layers if stage.has_head else 0):
            again, ahead = local.recompute.recomputes_ahead, local.layer_ahead
            ends = {"embedding": embedding_operations(local), "head": head_operations(local)}
            within = ("embedding_dropout", "final_norm")  # of them, in the module that is recomputed
            first, last = ([each for each in ends[end] if each.name in within] for end in ends)
            outside = [[each for each in ends[end] if each.name not in within] for end in ends]
            yield from located(f"mtp.{index}.", outside[0], local, False)
            yield from located(f"mtp.{index}.", [*first, *ahead_operations(local)], local, again)
            yield from located(f"mtp.{index}.layer.", layer_operations(ahead), ahead, again)
            yield from located(f"mtp.{index}.", last, local, again)
            yield from located(f"mtp.{index}.", outside[1], local, False)


def problems(spec: RunSpec) -> list[str]:
    """Return where the operations of the lists of a rank's stages differ from what its stages do."""
    parallel = {"zero_stage": 0, "tp_comm_overlap_weight_gather": False, "tp_comm_overlap_weight_grad": False}
    config = spec.config.model_copy(update={"parallel": spec.config.parallel.model_copy(update=parallel)})
    spec = RunSpec(config, spec.world_size, spec.arch.vocab_size, spec.rank)
    record, step = _run(spec)
    found = list[str]()
    by_module: dict[str, list[Listed]] = {}
    listed = list(listed_operations(step, record.modules))
    for each in listed:
        by_module.setdefault(each.module, []).append(each)
    for direction in (FORWARD, BACKWARD):
        for module in dict.fromkeys([*by_module, *(path for way, path in record.work if way == direction and path)]):
            seen = record.work.get((direction, module), Work())
            found += _differences(module, direction, by_module.get(module, []), seen)
    return [*found, *_disorder(listed, record.order)]


def _disorder(listed: Iterable[Listed], order: Iterable[str]) -> Iterator[str]:
    """Yield the first operation of a module that forward reaches at another place than the list.

    Operations that make no storage are left out, but for dispatch, which sorts rows also where it sends none.
    """
    first = dict[str, str]()
    for path, module, each, *_ in listed:
        if any((each.writes, each.saves, each.sent, each.kernels, each.flops, path.endswith(".dispatch"))):
            first.setdefault(module, path)
    run = [module for module in order if module in first]
    for mine, theirs in zip([module for module in first if module in run], run, strict=True):
        if mine != theirs:
            yield f"order of {first[mine]}: listed before {first[theirs]}, run behind it"
            return


def _differences(module: str, direction: str, listed: Sequence[Listed], seen: Work) -> Iterator[str]:
    works = [(each.path, each.work(direction)) for each in listed]
    names = ", ".join(path for path, _ in works) or f"{module}, of which nothing is listed,"
    calls, gemms = Counter[Traffic](), Counter[Gemm]()
    for _, work in works:
        calls += work.calls
        gemms += work.gemms
    for call in sorted({*calls, *seen.calls}):
        if calls[call] != seen.calls[call]:
            by = ", ".join(path for path, work in works if call in work.calls) or names
            yield f"{direction} of {by}: {calls[call]} listed, {seen.calls[call]} made: {call}"
    if gemms and gemms != seen.gemms:
        yield f"{direction} of {names}: GEMMs listed {dict(gemms)}, run {dict(seen.gemms)}"
    if (flops := sum(work.flops for _, work in works)) != seen.flops:
        yield f"{direction} of {names}: {flops} FLOPs listed, {seen.flops} run"
    if direction == FORWARD and not any(each.again is not None for each in listed):
        yield from _storages(names, listed, works, seen)


def _storages(names: str, listed: Sequence[Listed], works: Sequence[tuple[str, Work]], seen: Work) -> Iterator[str]:
    """Yield differences of what is kept and written; of experts only rows count, not numbers per token."""
    experts = [each.local for each in listed if each.local.experts and "mlp" in each.path]
    least = max((local.home_tokens * local.arch.hidden_size * local.itemsize for local in experts), default=0)
    kept = sorted(size for _, work in works for size in work.kept if size >= least)
    saved = sorted(size for size in seen.kept if size >= least)
    if sum(kept) != sum(saved):
        yield f"forward of {names}: kept listed {kept}, saved {saved}"
    written = Counter(size for _, work in works for size in work.written)
    if not experts and (extra := Counter(seen.written) - written):
        yield f"forward of {names}: others read {dict(extra)}, of which nothing is listed as written"


def _run(spec: RunSpec) -> tuple[ModuleRecord, StepSpec]:
    """Run one microbatch of the stages of a rank."""
    with FakeTensorMode():
        recorder = Recorder(LoopbackComm(spec.mesh))
        state = build_state(spec, recorder, torch.device("cpu"), has_values=False)
        model, batch, local = state.model, microbatches(spec)[0], make_step_spec(spec).local
        state.buffers.begin_step(2)  # the gradients of one microbatch are not reduced
        model.routers.begin_step(False)
        ahead = local.arch.mtp_num_layers
        at = model.begin(
            batch.tokens, 1, key=(1, 0), packing=spec.packing(0), starts=batch.starts, num_ahead=ahead * [1]
        )
        ahead_too = [replace(each, tokens_BL=each.tokens_BL.clone()) for each in at.ahead]
        at = replace(at, tokens_BL=at.tokens_BL.clone(), ahead=tuple(ahead_too))
        held = [tensor for tensors in tensors_by_kind(state).values() for tensor in tensors]
        tables = [tensor for each in at.rotary for tensor in each]
        targets = [at.target, *(each.target for each in at.ahead)]
        labels = [target.labels_M for target in targets if target]
        known = [*model.parameters(), *held, *tables, *labels, *_places(at, state.spec.mode.inner[0])]
        shape, dtype = (local.tokens, local.hidden), next(model.parameters()).dtype
        inputs = [
            None if each.has_embedding else torch.empty(shape, dtype=dtype).requires_grad_() for each in model.stages
        ]
        with ModuleRecord(model, recorder, known) as record:
            for stage, x_MH in zip(model.stages, inputs, strict=True):
                record.run(partial(model, stage, x_MH, at), x_MH)
    return record, make_step_spec(spec)


def _places(at: Pass, tokens: Axes) -> Iterator[Tensor]:
    """Yield the positions of a microbatch in its documents, and the indices of those of each context rank."""
    if at.documents and at.documents.positions_BS is not None:
        yield at.documents.positions_BS
    if (held := at.held_by(tokens)) is not None:
        order = held.among(0, at.order.num_ranks)
        yield from (held.mine_BL, order.rank_BS, order.row_BS, order.place_CBL)
