"""Measured time of a step over its floor, operation by operation: ours and a plain PyTorch GPT, in one process.

python benchmarks/limit.py [--sizes 3M 30M] [--precisions fp32 bf16] [--output benchmarks/results/limit.json]

The floor is each operation of `megatron3d/model/operations.py` alone, in turns with the steps: GEMMs and attention of
exactly its shapes (the faster of torch's kernel and ours), and the bytes of memory-bound kernels and of the optimizer,
at the speed of a copy of as many elements.  Operations of a step are told apart by the profiler: backward by the
sequence number of its forward.  *Rest* is additions, copies and views between modules; *between kernels* is what no
operation takes, which is Python's, or a GPU's idle time; it is below 0 where the profiler costs more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common.report import Row, circumstances, interleaved, show, write
from common.shapes import CPU, SIZES, Ours, Size
from peers.contestants import peer_step
from peers.plain_gpt import PlainGPT, gpt2_weights, plain_loss
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron3d.attention.attention import causal_attention, recomputes_softmax
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.step_spec import local_sizes
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.operation_table import operation_lists
from megatron3d.forecast.time.step import load_machine
from megatron3d.forecast.time.tasks import accesses_of
from megatron3d.linear.gemm import product
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.operation import Operation
from megatron3d.optim.rule_spec import rule_of

OURS, PLAIN, FLOOR = "megatron3d", "plain", "floor"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZER, REST, BETWEEN, STEP = "optimizer", "rest", "between kernels", "step"
Compute = Callable[[], object]
# Operations of one row, because a contestant computes them together, or outside of modules.
ROWS = {"loss": "head", "attention.layout": REST, "attention.add": REST, "mlp.add": REST}
# Modules of the plain GPT, and operations outside of modules by a part of their names.
PLAIN_NAMES = {
    "ln_1": "input_norm",
    "ln_2": "post_attention_norm",
    "ln_f": "final_norm",
    "lm_head": "head",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "wte": "embedding",
    "wpe": "embedding",
}
KERNEL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("scaled_dot_product", "Attention"), "attention.core"),
    "gelu": "mlp.activation",
    "cross_entropy": "head",
    "log_softmax": "head",
    "nll_loss": "head",
}
MARK, BACKWARD = "operation of the list: ", "autograd::engine::evaluate_function: "


class Kernel(NamedTuple):
    """Contestants for the floor of an operation, of which the fastest counts, and how often a step has it."""

    row: str
    calls: Sequence[Compute]
    times: float


class Floor:
    """The kernels of a step, each alone; `seconds` by row are medians over the rounds so far."""

    def __init__(self, size: Size, config: Config, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        # Of a cluster of GPUs, whose loss has the fewest accesses.
        self._machine: Machine = load_machine("dgx_h200", config.train.precision, 1)
        spec = size.spec(config)
        local = local_sizes(spec, KERNELS["cpu" if device.type == "cpu" else "gpu"])
        self._kernels: list[Kernel] = []
        for _, kind, operations, _ in operation_lists(local):
            count = size.num_microbatches
            if operations[0].name not in ("embedding", "final_norm"):
                count *= {each.layer: num for each, num in local.by_kind(range(size.num_layers))}[kind.layer]
            for each in operations:
                row = ROWS.get(each.name, each.name)
                self._kernels += (Kernel(row, calls, count * times) for calls, times in self._of(each))
        moved = self._machine.profile.optimizer_bytes + rule_of(config.optimizer).moved_bytes
        num_params = sum(x.numel() for x in Ours(size, config, device=device).state.model.parameters())
        self._kernels.append(Kernel(OPTIMIZER, [self._copy(num_params * moved)], 1))
        self._taken: list[list[list[float]]] = [[[] for _ in each.calls] for each in self._kernels]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self._dtype, device=self._device)

    def _copy(self, num_bytes: float) -> Compute:
        """Return a copy that reads and writes `num_bytes` in all."""
        x = torch.ones(max(round(num_bytes / 8), 1), device=self._device)
        return partial(torch.empty_like(x).copy_, x)

    def _of(self, operation: Operation) -> Iterator[tuple[Sequence[Compute], float]]:
        """Yield the kernels of one operation, forward and backward, and how often it has each."""
        chunks = operation.chunks or 1
        if (matmul := operation.matmul) is not None:
            yield from ((gemm, chunks) for gemm in self._gemms(-(-matmul.m // chunks), matmul.n, matmul.k))
        for each in operation.gemms:
            yield from ((gemm, each.batch) for gemm in self._gemms(round(each.m), round(each.n), round(each.k)))
        if (scores := operation.scores) is not None:
            shape = 1, scores.batch, scores.queries, scores.channels
            q, k, v = (self._random(*shape).requires_grad_() for _ in range(3))
            attend: list[Callable[..., Tensor]] = [partial(F.scaled_dot_product_attention, is_causal=True)]
            if recomputes_softmax(self._device.type, self._dtype, scores.queries):
                attend.append(causal_attention)
            dy, ys = self._random(*shape), [one(q, k, v) for one in attend]
            yield [partial(one, q, k, v) for one in attend], scores.share
            yield [partial(torch.autograd.grad, y, (q, k, v), dy, retain_graph=True) for y in ys], scores.share
        for kind, elements, _ in operation.kernels:
            size = self._dtype.itemsize
            accesses = accesses_of(kind, size, self._machine.on_gpu)
            if num := accesses.forward + accesses.backward:
                yield [self._copy(2 * elements * size)], num / 2
        for move in operation.moves:
            yield [self._copy(move.forward + move.backward)], 1

    def _gemms(self, m: int, n: int, k: int) -> Iterator[Sequence[Compute]]:
        """Yield forward, dgrad and wgrad, each by torch and by our kernel."""
        x, w, dy = self._random(m, k), self._random(n, k), self._random(m, n)
        for a, b in ((x, w), (dy, w.T), (dy.T, x.T)):
            yield partial(torch.mm, a, b.T), partial(product, a, b)

    def run(self) -> None:
        """Take the time of every kernel once, after one untimed call."""
        for kernel, taken in zip(self._kernels, self._taken, strict=True):
            for call, seconds in zip(kernel.calls, taken, strict=True):
                seconds.append(self._seconds(call))

    def _seconds(self, call: Compute) -> float:
        repeats = 1 if self._device.type == "cpu" else 20
        call()
        _wait(self._device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(self._device)
        return (time.perf_counter() - start) / repeats

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by row."""
        found: dict[str, float] = defaultdict(float)
        for kernel, taken in zip(self._kernels, self._taken, strict=True):
            found[kernel.row] += kernel.times * min(map(statistics.median, taken))
        return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Profiled:
    """A contestant's step, and the seconds of its operations by row, under the profiler."""

    def __init__(self, model: nn.Module, step: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._model, self._step, self._device = model, step, device
        self._taken: list[dict[str, float]] = []

    def step(self, tokens: Tensor) -> None:
        """Make one step, without the profiler."""
        self._step(tokens)
        _wait(self._device)

    def take(self, tokens: Tensor) -> None:
        """Make one step under the profiler."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type != "cpu")
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if (row := _row_of_module(name)) and not list(module.children()):
                    _mark(module, row, hooks)
            with profile(activities=activities) as profiler:
                self._step(tokens)
                _wait(self._device)
        self._taken.append(by_row(profiler.events(), self._device.type != "cpu"))

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds by row."""
        rows = {row for taken in self._taken for row in taken}
        return {row: statistics.median(taken.get(row, 0.0) for taken in self._taken) for row in rows}


def _row_of_module(name: str) -> str:
    parts = name.split(".")
    path = ".".join(parts[2:] if parts[0] in ("layers", "h") else parts)
    return PLAIN_NAMES.get(path, path)


def _mark(module: nn.Module, row: str, hooks: ExitStack) -> None:
    """Record a module's forward under its row's name."""
    opened: list[record_function] = []

    def before(*_: object) -> None:
        opened.append(record_function(MARK + row))
        opened[-1].__enter__()

    def after(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after)):
        hooks.callback(handle.remove)


def by_row(events: Sequence[Any], on_gpu: bool) -> dict[str, float]:
    """Return the seconds of all outermost operations of a profile by row.

    A node of backward has the sequence number of the forward that made it; what follows the last node is the optimizer.
    """
    outer = [each for each in events if each.cpu_parent is None and not each.is_async]
    ends = [each.time_range.end for each in outer if each.name.startswith(BACKWARD)]
    found, made = defaultdict[str, float](float), dict[int, str]()
    for each in sorted(outer, key=lambda each: each.time_range.start):
        if each.name.startswith(BACKWARD):
            row = made.get(each.sequence_nr, REST)
        elif each.time_range.start > max(ends):
            row = OPTIMIZER
        else:
            row = _row_of_event(each)
            made |= {one.sequence_nr: row for one in _with_children(each) if one.sequence_nr >= 0}
        found[row] += 1e-6 * (each.device_time_total if on_gpu else each.cpu_time_total)
    return found


def _row_of_event(event: Any) -> str:
    if event.name.startswith(MARK):
        name = str(event.name.removeprefix(MARK))
        return ROWS.get(name, name)
    return next((row for part, row in KERNEL_NAMES.items() if part in event.name), REST)


def _with_children(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from _with_children(child)


def contestants(size: Size, config: Config, precision: str, device: torch.device) -> Mapping[str, Profiled]:
    """Return our eager step, and that of the plain GPT, from the same weights."""
    ours = Ours(size, config, device=device)
    plain = PlainGPT(size.spec(config).arch)
    plain.load_state_dict(gpt2_weights({name: x.cpu().float() for name, x in ours.weights().items()}))
    peer = peer_step(plain.to(device), plain_loss, precision, fused=False)
    return {OURS: Profiled(ours.state.model, ours.step, device), PLAIN: Profiled(plain, peer, device)}


def measure(size_name: str, precision: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Return a row per operation, and one of the whole step."""
    size, tokens = SIZES[size_name], SIZES[size_name].tokens().to(device)
    config = size.config(precision)
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    floor, peers = Floor(size, config, DTYPES[precision], device), contestants(size, config, precision, device)
    calls: dict[str, Callable[[], object]] = {FLOOR: floor.run}
    for name, each in peers.items():
        calls |= {name: partial(each.step, tokens), f"{name}, profiled": partial(each.take, tokens)}
    turns = interleaved(calls, options.rounds, options.warmup)
    least = floor.seconds
    steps = {name: statistics.median(turn.wall_s for turn in turns[name]) for name in peers}
    names = [*dict.fromkeys((*least, REST, BETWEEN, STEP))]
    least[STEP] = sum(least.values())
    taken = {name: dict(each.seconds) for name, each in peers.items()}
    for name, parts in taken.items():
        parts[REST] = parts.get(REST, 0.0) + sum(parts.pop(row) for row in [*parts] if row not in names)
        parts |= {BETWEEN: steps[name] - sum(parts.values()), STEP: steps[name]}
    return [
        {"size": size_name, "precision": precision, "device": device.type, "operation": name}
        | {"floor_ms": 1e3 * least.get(name, 0.0)}
        | {f"{who}_ms": 1e3 * parts.get(name, 0.0) for who, parts in taken.items()}
        | {f"{who}_over_floor": _over(parts.get(name, 0.0), least.get(name, 0.0)) for who, parts in taken.items()}
        for name in names
    ]


def _over(measured: float, least: float) -> float | None:
    return measured / least if least else None


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    torch.set_num_threads(options.threads)
    found, rows = circumstances(), list[Row]()
    cpu, *_ = found["hardware"].values()
    print(f"{cpu}, load average {found['load_average']:.1f}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [CPU] if accelerator is None else [CPU, accelerator]
    for device in devices:
        for size in options.sizes:
            for precision in options.precisions:
                each = measure(size, precision, device, options)
                show(f"{size}, {precision}, {device.type}, milliseconds of a step", [_shown(row) for row in each])
                rows += each
    if options.output:
        write(options.output, rows, threads=options.threads, rounds=options.rounds)


def _shown(row: Row) -> Row:
    return {name: "" if value is None else value for name, value in [*row.items()][3:]}


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the tiny size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3M", "30M"])
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.warmup = ["tiny"], 1, 1
    return options


if __name__ == "__main__":
    main()
