"""A layer's operations as tasks: kernels, and the collectives that overlap with them or wait.

    linear    F    GEMM | all-gather X, reduce Y | all-gather W behind the GEMM of the linear before
              I    GEMM | all-gather dY | reduce dX | all-gather W behind two GEMMs
              W    GEMM | all-gather X again | add dW to main_grad, or reduce it behind two GEMMs
              B    as I and W, but X behind the dgrad GEMM, and dX behind the wgrad GEMM
    others    F    kernels, collectives            I, B    the same of backward            W    GEMMs of weights
    all       R    tasks of F, where the operation is recomputed

The list is that of this framework.  Another framework is a function from list to list (`practices.py`), and times are
sums over the list (`layer.py`).

With `tp_comm_overlap`, X, Y and dY move in rounds with the GEMM of their matmul where the plan allows.  Rounds also
cost p GEMMs of 1/p of the rows or columns, which fill the device less well than one, and a kernel that adds p terms.
A collective delivers shards one after another: concatenating along the first dimension needs no copy, along the second
each element is read and written once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import chain
from typing import NamedTuple

from megatron3d.forecast.memory.activations import modules_of
from megatron3d.linear.fp8_plan import Quantization, QuantizedMatmul, Recipe
from megatron3d.linear.overlap_plan import IN_ROUNDS, NO_ROUNDS, async_plan, in_rounds
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import LocalGemm, Operation, Scores
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, Traffic, moves, whole_bytes
from megatron3d.parallel.mesh import Mesh

# Phases of a layer, a letter each: forward, dgrad and wgrad of a split backward, an unsplit backward, recomputation.
FORWARD, SPLIT_DGRAD, SPLIT_WGRAD, WHOLE, AGAIN = PHASES = "FIWBR"
DGRAD, WGRAD = SPLIT_DGRAD + WHOLE, SPLIT_WGRAD + WHOLE

TASKS = "tasks"
# What tasks are: kernels, next to the kinds of `MemoryKernel`, and collectives.
GEMM, PRODUCT, SCORES, ROUNDS = "GEMM of a linear", "other GEMM", "scores", "rounds"
LOSS, ACCUMULATION, BIAS_GRAD, CONCAT, MOVED = "loss", "accumulation", "bias gradient", "concatenation", "moved"
OPERANDS, OPERANDS_IN_ROUNDS, WEIGHT = "operands", "operands in rounds", "weight"
INPUT_GRAD, WEIGHT_GRAD = "dX", "dW"
QUANTIZATION, SCALES = "quantization", "scales"
# Besides those that follow from the plan of a linear: these wait or are hidden, tokens on their way to their experts
# by the shared experts.
SENT, HIDDEN, TOKENS = SENDS = "sent", "hidden", "tokens"


class MemoryAccesses(NamedTuple):
    """Reads and writes of each element of a tensor by memory-bound kernels, forward and backward, and their number."""

    forward: float
    backward: float
    num_kernels: int = 1

    def of(self, phases: str) -> float:
        """Return the accesses of a phase."""
        return self.forward if phases in (FORWARD, AGAIN) else self.backward


NO_ACCESS = MemoryAccesses(0, 0)
UNARY = MemoryAccesses(2, 3)  # read x, write y; read x and dy, write dx
BINARY = MemoryAccesses(3, 3)
TWO_COPIES = MemoryAccesses(2, 2, 2)
# By kind, of this framework's kernels, for each element in the model's dtype.
#   rotary, not compiled: two multiplications (4), rotate-half (3) and an addition (3), and as many backward.
#   layout: q, k, v and attention's output are split, transposed and copied.
#   rows of experts: copied to the order of experts and back, weighted, and their slots added.
KERNELS: Mapping[str, MemoryAccesses] = {
    "norm": UNARY,
    "add": BINARY,
    "dropout": NO_ACCESS,  # the mask is made with the addition
    "activation": UNARY,
    "layout": TWO_COPIES,
    "rotary": MemoryAccesses(10, 10, 5),
    "rows": MemoryAccesses(7, 7, 7),
}
# Accesses per capped score, counted in the elementwise kernels around the plain matmuls of `attention/pairs.py`:
# they compute in fp32 on bf16 scores.
CAPPED_SCORES = MemoryAccesses(36.0, 52.0, 10)
# Bytes per weight to accumulate a gradient: read it (2), add it to fp32 main_grad (4 + 4).
GRAD_BYTES = 10.0
# The same of a dW that kernels of fp8 operands have written in fp32: none of them adds to its result.
FP8_GRAD_BYTES = 12.0
# Accesses of torch's operations that quantize an element in the dtype of its value: without sign and largest value (3),
# scale (2), conversion and order (3); and that restore one by way of fp32: conversion (2), scale (2), conversion (2).
TORCH_QUANTIZATION, TORCH_RESTORATION = MemoryAccesses(8, 8, 5), MemoryAccesses(6, 6, 5)
# Kernels of X or dY in compiled graphs: largest values in two steps, scales, values, and copies of data and scales.
TRACED_KERNELS = 6


class GemmKind(Enum):
    """Operands of a GEMM: those of the network's dtype, fp8, or fp32 or wider."""

    NATIVE = "native"
    FP8 = "fp8"
    WIDE = "wide"


class Task(NamedTuple):
    """Kernels or collectives of an operation.

    Attributes:
        operation: name of the operation; `what`: what the task is.
        phases: letters of the phases in which it runs.
        gemm: its GEMM, `kind`: its operands; `rounds`: of how many smaller GEMMs in its place it is what they take
            longer.
        scores: attention in one kernel.
        size, accesses, num_kernels: of memory-bound kernels, bytes of one access.
        repeats: how often it runs.
        calls: its collectives; `busiest`: bytes that the busiest rank sends, in multiples of this rank's.
        behind: what it overlaps with, names of `hides`, each as often as it is there.
        hides: name of what this and other tasks take together, which may hide others.
        most, share: parts of its own time, and of the time of what hides it, that overlap at most.
    """

    operation: str
    what: str
    phases: str
    gemm: LocalGemm | None = None
    kind: GemmKind = GemmKind.NATIVE
    rounds: tuple[int, LocalGemm] | None = None
    scores: Scores | None = None
    size: float = 0.0
    accesses: float = 1.0
    num_kernels: int = 1
    repeats: int = 1
    calls: Sequence[Traffic] = ()
    busiest: float = 1.0
    behind: tuple[str, ...] = ()
    hides: str = ""
    most: float = 1.0
    share: float = 1.0


def tasks_of(operations: Sequence[Operation], local: LocalSizes, is_recomputed: bool = False) -> list[Task]:
    """Return the tasks of operations; `is_recomputed`: all of these are recomputed, else those of chosen modules."""
    linears, found, modules = _linears(operations), list[Task](), modules_of(local)
    for each, tasks in zip(operations, _of_each(operations, local), strict=True):
        found += tasks
        if is_recomputed or (modules and each.is_again(modules)):
            found += _again(tasks, local) if is_recomputed else _alone_again(tasks, local)
            found += _sent(each, AGAIN, each.sent_again(modules), each.hidden, linears)
    return found


def _of_each(operations: Sequence[Operation], local: LocalSizes) -> Sequence[Sequence[Task]]:
    """Return the tasks of each operation without recomputation, on which they do not depend: they are listed once."""
    known: tuple[Sequence[Operation], Sequence[Sequence[Task]]] = local.listed.get(TASKS, ((), ()))
    if known[0] is not operations:
        linears = _linears(operations)
        # The weight of the first linear is prefetched during the last one of the layer before.
        before = dict(zip(linears, linears[-1:] + linears[:-1], strict=True))
        known = local.listed[TASKS] = operations, [[*_of(each, before, local)] for each in operations]
    return known[1]


def _linears(operations: Sequence[Operation]) -> list[str]:
    """Return the linears whose backward is not a part of their forward."""
    return [each.name for each in operations if each.matmul is not None and not each.chunks]


def _of(operation: Operation, before: Mapping[str, str], local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks of an operation; `before` is the linear before each."""
    back, hidden = operation.sent_back, operation.hidden_back
    yield from _kernels(operation, local)
    yield from _sent(operation, FORWARD, operation.sent, operation.hidden, before)
    yield from _sent(operation, SPLIT_DGRAD, back, hidden, before)
    yield from _sent(operation, WHOLE, back, hidden, before)
    if operation.name in before:
        yield from _linear(operation, before[operation.name], local)
    elif operation.matmul is not None:
        yield from _in_chunks(operation, local)


def accesses_of(kind: str, itemsize: int, on_gpu: bool) -> MemoryAccesses:
    """Return the accesses per element of this framework's memory-bound kernels of a kind.

    The loss and its gradient, the GEMMs not included: on GPUs two fused kernels read the fp32 logits, read them again
    and write the gradient (`ops/triton_kernels.py`); otherwise maximum (1 access), difference and exponential (4), sum
    (1) and scale (2) of `ops/cross_entropy.py`, and casts of narrower logits and gradients.
    """
    if kind != LOSS:
        return KERNELS[kind]
    wide = max(itemsize, 4)
    if on_gpu and wide == 4:
        return MemoryAccesses((2 * wide + itemsize) / itemsize, 0, 2)
    casts = 2 * (itemsize + wide) if itemsize < wide else 0
    return MemoryAccesses((8 * wide + casts) / itemsize, 0, 10)


def _kernels(operation: Operation, local: LocalSizes) -> Iterator[Task]:
    """Yield the kernels of an operation that is no linear; a linear may have further ones as well."""
    name, keys = operation.name, {phases: _key(operation.name, phases) for phases in (FORWARD, DGRAD)}
    for kind, elements, launches in operation.kernels:
        accesses, size = accesses_of(kind, local.itemsize, local.kernels.on_gpu), elements * local.itemsize / launches
        each = Task(name, kind, "", size=size, num_kernels=accesses.num_kernels, repeats=launches)
        for phases, key in keys.items():
            yield each._replace(phases=phases, accesses=accesses.of(phases), hides=key)
    for move in operation.moves:
        yield Task(name, MOVED, FORWARD, size=move.forward, num_kernels=move.num_forward, hides=keys[FORWARD])
        yield Task(name, MOVED, DGRAD, size=move.backward, num_kernels=move.num_backward, hides=keys[DGRAD])
    for gemm in operation.gemms:
        if operation.fp8 is not None:
            yield from _rows_in_fp8(operation, operation.fp8, gemm, local)
            continue
        yield Task(name, PRODUCT, FORWARD, gemm, hides=name)
        if not operation.backward_flops:
            continue
        yield Task(name, PRODUCT, DGRAD, gemm)
        yield Task(name, PRODUCT, WGRAD, gemm)
        yield _accumulation(name, WGRAD, gemm.batch * gemm.n * gemm.k, is_reduced=False)
    if operation.scores is not None:
        for phases, key in keys.items():
            attention = Task(name, SCORES, phases, scores=operation.scores, hides=key)
            yield from in_memory(attention, CAPPED_SCORES, local) if operation.scores.is_plain else (attention,)


def in_memory(attention: Task, accesses: MemoryAccesses, local: LocalSizes) -> Iterator[Task]:
    """Yield attention whose scores are written to memory: two batches of GEMMs, and kernels on scores between them."""
    scores = attention.scores
    assert scores is not None, f"{attention.operation} has scores"
    batch, queries, keys, channels = scores[:4]
    each = attention._replace(scores=None)
    for gemm in (LocalGemm(queries, keys, channels, batch), LocalGemm(queries, channels, keys, batch)):
        yield each._replace(gemm=gemm, repeats=2 if attention.phases == DGRAD else 1)
    size = batch * queries * keys * local.itemsize
    yield each._replace(size=size, accesses=accesses.of(attention.phases), num_kernels=accesses.num_kernels)


def _accumulation(name: str, phases: str, num_weights: float, is_reduced: bool, repeats: int = 1) -> Task:
    """Return the accumulation of a gradient, which its GEMM does where no axes reduce it."""
    behind = () if is_reduced else (name,)
    return Task(name, ACCUMULATION, phases, size=num_weights, accesses=GRAD_BYTES, repeats=repeats, behind=behind)


def _linear(operation: Operation, before: str, local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks of a linear; `before` is the linear before it."""
    name, matmul, mesh, overlap = operation.name, operation.matmul, local.mesh, local.overlap
    assert matmul is not None, f"{name} is a linear"
    plan, gemm = matmul.plan, LocalGemm(*matmul.multiplied(mesh))
    sent = operation.flows(local)
    named = in_rounds(sent, plan) if overlap.in_rounds else sent
    gathers_w = [] if overlap.keep_gathered_weights else sent.w_again
    two = (name, name)
    kind = _gemm_kind(operation, local)
    yield Task(name, GEMM, FORWARD, gemm, kind, hides=name)
    yield Task(name, GEMM, DGRAD, gemm, kind)
    yield Task(name, GEMM, WGRAD, gemm, kind)
    yield from _quantization(operation, local)
    yield from _rounds(operation, gemm, local)
    yield from _operands(name, FORWARD, named.gather_x + named.reduce_y, (name, f"{name} in rounds"), mesh)
    yield from _operands(name, DGRAD, named.gather_dy, (name,), mesh)
    yield from _operands(name, SPLIT_DGRAD if overlap.input_grad else DGRAD, named.reduce_dx, (name,), mesh)
    for what, phases, calls, behind in (
        (WEIGHT, FORWARD, sent.gather_w, (before,) * overlap.weight_gather),
        (WEIGHT, DGRAD, gathers_w, two * overlap.weight_gather),
        (WEIGHT_GRAD, WGRAD, sent.reduce_dw, two * overlap.weight_grad),
        (SCALES, FORWARD, sent.scales, ()),
        (SCALES, DGRAD, sent.scales_back, ()),
        (SENT, SPLIT_WGRAD, sent.x_again, ()),
        (HIDDEN, WHOLE, sent.x_again, (name,)),
        (INPUT_GRAD, WHOLE, sent.reduce_dx if overlap.input_grad else [], (name,)),
    ):
        if calls:
            yield Task(name, what, phases, calls=calls, behind=behind)
    if operation.has_bias:
        yield Task(name, BIAS_GRAD, DGRAD, size=gemm.m * gemm.n / mesh.size(plan.dy) * local.itemsize)
    accumulation = _accumulation(name, WGRAD, gemm.n * gemm.k / mesh.size(plan.w), bool(sent.reduce_dw))
    yield accumulation if kind is not GemmKind.FP8 else accumulation._replace(accesses=FP8_GRAD_BYTES, behind=())
    copied = concat_copies(plan, mesh, *matmul[1:4], local.itemsize)
    sizes = {FORWARD: copied.forward, DGRAD: copied.dy + copied.dx + copied.w * bool(gathers_w)}
    for phases, size in (sizes | {WGRAD: copied.x + copied.w}).items():
        if size:
            yield Task(name, CONCAT, phases, size=size)


def _rows_in_fp8(operation: Operation, fp8: QuantizedMatmul, gemms: LocalGemm, local: LocalSizes) -> Iterator[Task]:
    """Yield the kernels of experts' rows in fp8 (`linear/fp8_rows.py`), whose GEMMs are a loop over the experts.

    X and dY are quantized once for all rows, W once per expert and direction.  Each Y and dX is copied to the rows of
    its expert.  dW multiplies in the network's dtype, X restored from fp8, and is accumulated by its GEMM.
    """
    name, kind, count, one = operation.name, _gemm_kind(operation, local), gemms.batch, gemms._replace(batch=1)
    rows, packed = replace(fp8, m=round(gemms.m * count)), operation.rows_packed
    x, wgrad = replace(fp8, m=packed or rows.m).multiplied("MK"), f"{name}, wgrad"
    y_bytes, dx_bytes = (2 * one.m * numel * local.itemsize for numel in (one.n, one.k))
    of_w = (Quantization(fp8.multiplied(dims), is_weight=True) for dims in ("NK", "KN"))
    for phases, size, w, product_bytes in (
        (FORWARD, x, next(of_w), y_bytes),
        (DGRAD, rows.multiplied("MN"), next(of_w), dx_bytes),
    ):
        moved, num_kernels = _quantized([Quantization(size)], fp8, local)
        yield Task(name, QUANTIZATION, phases, size=moved, num_kernels=num_kernels)
        moved, num_kernels = _quantized([w], fp8, local)
        if fp8.stores_w:  # its transpose is a copy
            moved, num_kernels = 2.0 * w.size.numel * (phases == DGRAD), 1
        yield Task(name, QUANTIZATION, phases, size=moved, num_kernels=num_kernels, repeats=count)
        yield Task(name, PRODUCT, phases, one, kind, repeats=count)
        yield Task(name, MOVED, phases, size=product_bytes, repeats=count)
    if packed:  # bytes of data and scales side by side, and apart
        yield Task(name, MOVED, FORWARD, size=2.0 * (x.num_bytes + rows.multiplied("MK").num_bytes), num_kernels=3)
    restored: dict[str, Sequence[str]] = {WGRAD: ("MK",)}
    if not local.kernels.multiplies_fp8:
        restored |= {FORWARD: ("MK", "NK"), DGRAD: ("MN", "KN")}
    for phases, operands in restored.items():
        moved = sum(fp8.multiplied(dims).numel for dims in operands) * local.wide * TORCH_RESTORATION.forward
        num_kernels = len(operands) * TORCH_RESTORATION.num_kernels
        yield Task(name, QUANTIZATION, phases, size=moved, num_kernels=num_kernels, repeats=count)
    yield Task(name, PRODUCT, WGRAD, one, repeats=count, hides=wgrad)
    yield _accumulation(name, WGRAD, count * one.n * one.k, is_reduced=False)._replace(behind=(wgrad,))


def _gemm_kind(operation: Operation, local: LocalSizes) -> GemmKind:
    """Return the operands of a linear's GEMMs; dequantized ones are as wide as their values need."""
    if operation.fp8 is None:
        return GemmKind.NATIVE
    if local.kernels.multiplies_fp8:
        return GemmKind.FP8
    return GemmKind.NATIVE if operation.fp8.recipe.has_powers else GemmKind.WIDE


def _quantization(operation: Operation, local: LocalSizes) -> Iterator[Task]:
    """Yield the kernels that quantize the operands of a linear and, where none multiplies fp8, restore them.

    A compiled graph makes X and dY itself, W is quantized outside.
    """
    name, fp8 = operation.name, operation.fp8
    if fp8 is None:
        return
    for phases, each in zip((FORWARD, DGRAD), fp8.quantizations(), strict=True):
        outside = [one for one in each if one.is_weight or not operation.is_traced]
        moved, count = _quantized(outside, fp8, local)
        if operation.is_traced:
            first, second = (one for one in each if not one.is_weight)
            moved, count = moved + traced_bytes(first, second, fp8.recipe, local.itemsize), count + TRACED_KERNELS
        yield Task(name, QUANTIZATION, phases, size=moved, num_kernels=count)
    restores = not local.kernels.multiplies_fp8
    for phases, operands in ((FORWARD, ("MK", "NK")), (DGRAD, ("MN", "KN")), (WGRAD, ("NM", "KM"))) * restores:
        numel, count = sum(fp8.multiplied(dims).numel for dims in operands), 2 * TORCH_RESTORATION.num_kernels
        moved = numel * local.wide * TORCH_RESTORATION.forward
        yield Task(name, QUANTIZATION, phases, size=moved, num_kernels=count)


def _quantized(each: Sequence[Quantization], fp8: QuantizedMatmul, local: LocalSizes) -> tuple[float, int]:
    """Return the bytes that kernels outside compiled graphs move, and their number: blocks take one on GPUs."""
    if local.kernels.on_gpu and fp8.recipe.block is not None:
        return float(sum(one.moved_bytes(local.itemsize) for one in each)), len(each)
    value = local.itemsize if fp8.recipe.has_powers else local.wide
    made = [one for one in each if not (one.source == "other form" and fp8.recipe.x.is_square)]
    numel = sum(one.size.numel for one in made)
    return numel * value * TORCH_QUANTIZATION.forward, len(made) * TORCH_QUANTIZATION.num_kernels


def traced_bytes(first: Quantization, second: Quantization, recipe: Recipe, itemsize: int) -> float:
    """Return the bytes that a compiled graph moves to make X or dY in both forms, and that transposing the second does.

    By element of `itemsize`, v; Inductor fuses what has one order of elements, and reads no values but for these:

        whole tensor            largest value v | both forms v + 1 + 1
        rows, blocks            largest value of the second form v | that of the first, and both forms v + 1 + 1
        dY that is sent as fp8  largest value, first form v + 1 | largest value of the second 1 | second form 1 + 1

    The operator that multiplies copies the second form to its transpose, 1 + 1, and its scales.  What makes X or dY is
    fused with the first of these kernels where that has its order, which is not counted.
    """
    is_made_of_fp8 = second.source == "other form" and not recipe.x.is_square
    values = itemsize + 4 if is_made_of_fp8 else 2 * itemsize + 2
    scales = (first.size.num_scales + 3 * second.size.num_scales) * recipe.scale_bytes
    return first.size.numel * (values + 2) + scales


def _operands(name: str, phases: str, calls: Sequence[Traffic], behind: tuple[str, ...], mesh: Mesh) -> Iterator[Task]:
    """Yield the collectives of a GEMM's own operands; those in rounds overlap with all rounds of it but one."""
    for call in calls:
        if call.collective in IN_ROUNDS:
            share = 1 - 1 / mesh.size(call.axes)
            yield Task(name, OPERANDS_IN_ROUNDS, phases, calls=(call,), behind=behind, share=share)
    if rest := [call for call in calls if call.collective not in IN_ROUNDS]:
        yield Task(name, OPERANDS, phases, calls=rest)


def _rounds(operation: Operation, gemm: LocalGemm, local: LocalSizes) -> Iterator[Task]:
    """Yield what rounds add to a linear: smaller GEMMs, and sums of a part's terms."""
    name, mesh, matmul = operation.name, local.mesh, operation.matmul
    assert matmul is not None, f"{name} is a linear"
    rounds = async_plan(matmul.plan) if local.overlap.in_rounds else NO_ROUNDS
    backward = LocalGemm(gemm.m, gemm.k, gemm.n)
    reduces_dx = SPLIT_DGRAD if local.overlap.input_grad else DGRAD
    for phases, move, whole, dims, adds in (
        (FORWARD, rounds.x or rounds.y, gemm, "MNK", rounds.y is not None),
        (DGRAD, rounds.dy, backward, "MKN", False),
        (reduces_dx, rounds.dx, backward, "MKN", True),
    ):
        if move is not None:
            ranks = mesh.size(move.axes)
            m, n, k = (size / ranks if dim == move.dim else size for dim, size in zip(dims, whole[:3], strict=True))
            key = f"{name} in rounds" if phases == FORWARD else ""
            yield Task(name, ROUNDS, phases, whole, rounds=(ranks, LocalGemm(m, n, k)), hides=key)
            if adds:  # all terms of this rank's part are read, and their sum written
                size = whole.m * whole.n * (1 + 1 / ranks) * local.itemsize
                yield Task(name, ROUNDS, phases, size=size, hides=key)


def _in_chunks(operation: Operation, local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks of a linear whose forward has three GEMMs for each chunk of tokens; its collectives are sent."""
    name, matmul, count = operation.name, operation.matmul, operation.chunks
    assert matmul is not None, f"{name} is a linear"
    m, n, k = matmul.multiplied(local.mesh)
    each = LocalGemm(m / count, n, k)
    yield Task(name, GEMM, FORWARD, each, hides=name)
    yield Task(name, GEMM, FORWARD, each, repeats=3 * count - 1)
    is_reduced = bool(local.mesh.nontrivial(matmul.plan.w))
    yield _accumulation(name, FORWARD, n * k, is_reduced, repeats=1 if is_reduced else count)
    copied = concat_copies(matmul.plan, local.mesh, *matmul[1:4], local.itemsize)
    yield Task(name, CONCAT, FORWARD, size=sum(copied))


def _sent(
    operation: Operation, phases: str, calls: Sequence[Traffic], hidden: Sequence[Traffic], linears: Collection[str]
) -> Iterator[Task]:
    """Yield collectives of a phase: those that wait, and those that are hidden by other operations."""
    direction, gemms = FORWARD if phases == AGAIN else phases, 2 if phases == WHOLE else 1
    behind = [[name] * gemms if name in linears else [_key(name, direction)] for name in operation.behind]
    for what, some, names in (
        (SENT, [call for call in calls if call not in hidden], ()),
        (operation.hides_if or HIDDEN, [call for call in calls if call in hidden], tuple(chain(*behind))),
    ):
        if some:
            yield Task(operation.name, what, phases, calls=some, behind=names, busiest=operation.busiest)


def _key(name: str, phases: str) -> str:
    """Return the name under which the kernels of an operation hide others."""
    return f"{name}, {'forward' if phases == FORWARD else 'backward'}"


def _again(tasks: Sequence[Task], local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks of a forward in backward, but what it sends; it waits for weights, unless they are kept."""
    for task in tasks:
        is_weight = task.what == WEIGHT
        if task.phases == FORWARD and not (task.what in SENDS or (is_weight and local.overlap.keep_gathered_weights)):
            yield task._replace(phases=AGAIN, hides="", behind=() if is_weight else task.behind)


def _alone_again(tasks: Sequence[Task], local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks of a module that is recomputed on its own, which nothing overlaps with, but what it sends."""
    keeps_weights = local.overlap.keep_gathered_weights
    for task in tasks:
        if task.phases == FORWARD and not (task.what in SENDS or (task.what == WEIGHT and keeps_weights)):
            yield task._replace(what=SENT if task.calls else task.what, phases=AGAIN, behind=(), hides="")


class ConcatCopies(NamedTuple):
    """Copied bytes by operand of Y[m, n] = X[m, k] W[n, k]^T and of its gradients; those of dW are W's."""

    x: float = 0
    w: float = 0
    y: float = 0
    dy: float = 0
    dx: float = 0

    @property
    def forward(self) -> float:
        """Bytes copied by the forward matmul."""
        return self.x + self.w + self.y


def concat_copies(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> ConcatCopies:
    """Return the copies of one matmul with global sizes m, n, k."""
    plan = plan.on(mesh)
    x, w, y = whole_bytes(plan, mesh, m, n, k, itemsize)
    return ConcatCopies(
        _copied(moves(plan.x), "K", x, mesh),
        _copied(moves(plan.w), "K", w, mesh),
        _copied(moves(plan.y), "N", y, mesh),
        _copied(moves(plan.dy), "N", y, mesh),
        _copied(plan.dx_moves, "K", x, mesh),
    )


def _copied(steps: Iterable[Move], second: str, whole_bytes: float, mesh: Mesh) -> float:
    total = 0.0
    for axes, dim in steps:
        total += 2 * whole_bytes * (dim == second)
        whole_bytes /= mesh.size(axes) if dim else 1
    return total
