"""Table of the operations of a rank for one microbatch: FLOPs, bytes kept and sent, and predicted time.

It reads the lists of `model/operations.py` as all sums do, and knows none of their entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron3d.forecast.memory.activations import modules_of, total_bytes
from megatron3d.forecast.memory.table import BYTES, OPERATIONS, align_columns, unit_for
from megatron3d.forecast.time.layer import Machine, TimedTasks
from megatron3d.forecast.time.tasks import AGAIN, FORWARD, WHOLE, Task
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import Operation, kept_by
from megatron3d.model.operations import ahead_operations, embedding_operations, head_operations, layer_operations

Numbers = tuple[float, ...]
_TOTAL, _AGAIN = "in all", "recomputation"


def operation_lists(local: LocalSizes) -> Iterator[tuple[str, LocalSizes, Sequence[Operation], bool]]:
    """Yield the title, sizes and operations of each kind of layer and of the ends, and whether all are recomputed."""
    yield "embedding", local, embedding_operations(local), False
    for kind, count in local.by_kind(range(local.arch.num_layers)):
        title = f"layer {kind.layer}, one of {count} alike"
        yield title, kind, layer_operations(kind), local.recompute.granularity == "full"
    if local.arch.mtp_num_layers:
        title = "module of multi-token prediction, besides a layer and both ends"
        yield title, local, ahead_operations(local), local.recompute.recomputes_ahead
    yield "head", local, head_operations(local), False


def operation_table(local: LocalSizes, machine: Machine) -> list[str]:
    """Return the operations as text, forward | backward; a total is that of a list, with what is recomputed in it."""
    lists = [
        (title, list(_rows(kind, operations, is_recomputed, machine)))
        for title, kind, operations, is_recomputed in operation_lists(local)
    ]
    columns = [*zip(*(numbers for _, rows in lists for _, numbers in rows), strict=True)]
    units = [unit_for(max(map(max, columns[i:j])), kinds) for i, j, kinds in ((0, 2, OPERATIONS), (2, 5, BYTES))]
    (flop, per_flop), (byte, per_byte) = units
    scales = [per_flop] * 2 + [per_byte] * 3 + [1e-3] * 2
    table: list[tuple[str, ...]] = [
        (flop, "backward", f"kept {byte}", f"sent {byte}", "backward", "ms", "backward", "")
    ]
    for title, rows in lists:
        table.append(("",) * 7 + (f"{title}:",))
        table += [
            (*(f"{number / scale:,.3f}" for number, scale in zip(numbers, scales, strict=True)), f"  {name}")
            for name, numbers in rows
        ]
    return align_columns(table)


def _rows(
    local: LocalSizes, operations: Sequence[Operation], is_recomputed: bool, machine: Machine
) -> Iterator[tuple[str, Numbers]]:
    """Yield the name and numbers of each operation, of what is recomputed, and of all.

    They are FLOPs of forward and backward, bytes kept, bytes sent in both, and seconds of both.
    """
    found, times = [], TimedTasks.of(operations, local, machine, is_recomputed)
    for each, kept in kept_by(operations, modules_of(local)):
        mine = [task for task in times.tasks if task.operation == each.name and task.phases != AGAIN]
        sent = (_sent_bytes(mine, phase) for phase in (FORWARD, WHOLE))
        seconds = times.sums(mine)
        numbers = (each.flops, each.backward_flops, total_bytes(kept), *sent)
        found.append((each.name, (*numbers, seconds.forward.total, seconds.backward.total)))
    again = [task for task in times.tasks if task.phases == AGAIN]
    if seconds_again := times.sums(again).backward.total:
        flops = sum(each.flops for each in operations if is_recomputed or each.is_again(modules_of(local)))
        # A layer that is recomputed keeps its input, and frees the rest until its backward.
        freed = local.residual - sum(numbers[2] for _, numbers in found) if is_recomputed else 0
        found.append((_AGAIN, (0, flops, freed, 0, _sent_bytes(again, AGAIN), 0.0, seconds_again)))
    yield from found
    yield _TOTAL, tuple(map(sum, zip(*(numbers for _, numbers in found), strict=True)))


def _sent_bytes(tasks: Sequence[Task], phase: str) -> float:
    return sum(call.wire_bytes for task in tasks if phase in task.phases for call in task.calls)
