"""Checkpointing compared with torch.distributed.checkpoint: stall of a save, time to disk, to load and to reshard.

Ranks hold equal rows of the fp32 master weights and both moments of a GPT (bf16 weights follow from these and are not
saved).  Both sides save and load the same bytes of the same memory, with fsync.  Ours computes and verifies checksums.
Torch's asynchronous save reuses its staging memory, which is its faster option.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common.report import Row, show, write
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.store import Piece, load, resolve
from megatron3d.comm.objects import background_comm
from megatron3d.optim.rule_spec import RULES
from megatron3d.parallel.layout import Shape, box, box_shape
from megatron3d.parallel.mesh import Mesh

# Layers, hidden size, vocabulary.
SIZES = {"1M": (4, 128, 1024), "10M": (8, 256, 16384), "100M": (10, 768, 36864), "300M": (20, 1024, 50304)}
KINDS = ("model", *(f"optimizer.{state.name}" for state in RULES["adam"].states))
ROWS, COLUMNS = (("data",), ()), ((), ("data",))


def shapes(size: str) -> Iterator[tuple[str, Shape]]:
    """Return names and shapes of the weights."""
    layers, hidden, vocabulary = SIZES[size]
    yield "embedding", (vocabulary, hidden)
    for layer in range(layers):
        yield from ((f"{layer}.qkv", (3 * hidden, hidden)), (f"{layer}.proj", (hidden, hidden)))
        yield from ((f"{layer}.fc1", (4 * hidden, hidden)), (f"{layer}.fc2", (hidden, 4 * hidden)))
        yield f"{layer}.norm", (hidden,)


class State:
    """Shard of the training state on one rank, as views of rows, or of columns if a tensor has two dims."""

    def __init__(self, size: str, mesh: Mesh) -> None:
        self.mesh = mesh
        self.shapes = {f"{kind}.{name}": shape for kind in KINDS for name, shape in shapes(size)}
        numels = {name: math.prod(shape) // mesh.world_size for name, shape in self.shapes.items()}
        self.memory = {name: torch.empty(numel) for name, numel in numels.items()}
        self.device_mesh = init_device_mesh("cpu", (mesh.world_size,))

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks together."""
        return sum(tensor.nbytes for tensor in self.memory.values()) * self.mesh.world_size

    def pieces(self, by: tuple[Any, ...], copy: Callable[[Tensor], Tensor] = lambda t: t) -> Iterable[Piece]:
        """Return rows or columns as our pieces."""
        for name, shape in self.shapes.items():
            part = box(shape, by[: len(shape)] if len(shape) > 1 else ROWS[:1], self.mesh)
            yield Piece(name, shape, part, copy(self.memory[name]).view(box_shape(part)))

    def dtensors(self, by: tuple[Any, ...]) -> dict[str, Any]:
        """Return rows or columns as torch's DTensors."""
        found: dict[str, Any] = {}
        for piece in self.pieces(by):
            dim = 1 if by == COLUMNS and len(piece.shape) > 1 else 0
            found[piece.name] = DTensor.from_local(piece.tensor, self.device_mesh, [Shard(dim)])
        return found

    def fill(self) -> None:
        """Set every element to a number of its own, within fp32's precision."""
        for number, piece in enumerate(self.pieces(ROWS)):
            (low, _), *_ = piece.box
            first = low * math.prod(piece.shape[1:])
            torch.arange(first, first + piece.tensor.numel(), out=piece.tensor.view(-1)).add_(number)

    def check(self, by: tuple[Any, ...]) -> None:
        """Verify the values of every tenth tensor."""
        for number, piece in list(enumerate(self.pieces(by)))[::10]:
            whole = torch.arange(math.prod(piece.shape), dtype=torch.float32).add_(number).view(piece.shape)
            assert torch.equal(piece.tensor, whole[tuple(slice(*ends) for ends in piece.box)]), piece.name


class Compared(NamedTuple):
    """What is compared: `measure(state, folder, rounds, warmup)` of one rank, and the table of what it returns."""

    measure: Callable[..., Any]
    table: Callable[..., list[Row]]


@dataclass
class Bench:
    """The contestants, each a function that returns seconds by name."""

    state: State
    folder: Path
    ours: CheckpointSaver
    ours_now: CheckpointSaver
    stager: DefaultStager
    aside: dist.ProcessGroup
    copies: dict[str, Tensor]

    def copy(self) -> Mapping[str, float]:
        """Copy the same bytes to allocated memory."""
        return {"plain copy": timed(lambda: [self.copies[n].copy_(t) for n, t in self.state.memory.items()])}

    def save_ours(self) -> Mapping[str, float]:
        """Save with our store in the background."""
        begin = time.perf_counter()
        stall = timed(lambda: self.ours.save(1, lambda copy: self.state.pieces(ROWS, copy), {}))
        self.ours.wait()
        return {"stall ours": stall, "async save ours": time.perf_counter() - begin}

    def save_torch(self) -> Mapping[str, float]:
        """Save with torch in the background."""
        begin = time.perf_counter()
        futures: list[Any] = []
        stall = timed(lambda: futures.append(self._async_save()))
        cast("Future[Any]", futures[0]).result()
        return {"stall torch": stall, "async save torch": time.perf_counter() - begin}

    def _async_save(self) -> object:
        state = self.state.dtensors(ROWS)
        writer = dcp.FileSystemWriter(self.folder / "torch async")  # type: ignore[attr-defined]
        return dcp.async_save(state, storage_writer=writer, process_group=self.aside, async_stager=self.stager)  # type: ignore[attr-defined]

    def save_ours_now(self) -> Mapping[str, float]:
        """Save with our store in the foreground."""
        return {"save ours": timed(lambda: self.ours_now.save(1, lambda copy: self.state.pieces(ROWS, copy), {}))}

    def save_torch_now(self) -> Mapping[str, float]:
        """Save with torch in the foreground."""
        writer = dcp.FileSystemWriter(self.folder / "torch")  # type: ignore[attr-defined]
        return {"save torch": timed(lambda: dcp.save(self.state.dtensors(ROWS), storage_writer=writer))}  # type: ignore[attr-defined]

    def load_ours(self, what: str, by: tuple[Any, ...]) -> Mapping[str, float]:
        """Load with our store: whole boxes where `by` is what was saved, else a part of every rank's boxes."""
        seconds = timed(lambda: load(resolve(self.ours_now.root), self.state.pieces(by)))
        self.state.check(by)
        return {f"{what} ours": seconds}

    def load_torch(self, what: str, by: tuple[Any, ...]) -> Mapping[str, float]:
        """Load with torch."""
        reader = dcp.FileSystemReader(self.folder / "torch")  # type: ignore[attr-defined]
        seconds = timed(lambda: dcp.load(self.state.dtensors(by), storage_reader=reader))  # type: ignore[attr-defined]
        self.state.check(by)
        return {f"{what} torch": seconds}


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of an action, after a barrier."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(state: State, folder: Path, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Return the seconds of every round, of the slowest rank, by action; contestants rotate within a round."""
    comm = background_comm(state.mesh)
    group = dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copies = {name: torch.empty_like(tensor) for name, tensor in state.memory.items()}
    savers = [CheckpointSaver(folder / name, comm, in_background=name == "async") for name in ("async", "now")]
    bench = Bench(state, folder, savers[0], savers[1], stager, cast("dist.ProcessGroup", group), copies)
    pairs: list[list[Callable[[], Mapping[str, float]]]] = [
        [bench.copy, bench.save_ours, bench.save_torch],
        [bench.save_ours_now, bench.save_torch_now],
        [lambda: bench.load_ours("load", ROWS), lambda: bench.load_torch("load", ROWS)],
        [lambda: bench.load_ours("reshard", COLUMNS), lambda: bench.load_torch("reshard", COLUMNS)],
    ]
    found: dict[str, list[float]] = {}
    for number in range(-warmup, rounds):
        state.fill()
        for pair in pairs:
            shift = number % len(pair)
            for contestant in pair[shift:] + pair[:shift]:
                for name, seconds in slowest(contestant()).items():
                    found.setdefault(name, []).extend([seconds] if number >= 0 else [])
        dist.barrier()
        if state.mesh.rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    stager.close()
    return found


def slowest(seconds: Mapping[str, float]) -> Mapping[str, float]:
    """Return the maximum over ranks."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


def table(size: str, ranks: int, num_bytes: int, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return medians, and medians of each round's ratio to the baseline (our time / baseline time)."""
    peers = {"stall ours": ("plain copy", "stall torch")} | {
        f"{what} ours": (f"{what} torch",) for what in ("async save", "save", "load", "reshard")
    }
    rows: list[Row] = []
    for ours, others in peers.items():
        for other in others:
            ratio = statistics.median(a / b for a, b in zip(found[ours], found[other], strict=True))
            seconds = [statistics.median(found[name]) for name in (ours, other)]
            speed = num_bytes / 1e9 / seconds[0]
            labels = {"size": size, "ranks": ranks, "what": ours.removesuffix(" ours"), "peer": other}
            rows.append({**labels, "ours_s": seconds[0], "peer_s": seconds[1], "ratio": ratio, "ours_GB/s": speed})
    return rows


def run_rank(rank: int, ranks: int, store: str, options: argparse.Namespace, compared: Compared, rows: Any) -> None:
    """Measure all sizes on one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size in options.sizes:
        state, folder = State(size, Mesh((("data", ranks),), rank)), Path(store).with_name(size)
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        found = compared.measure(state, folder, options.rounds, options.warmup)
        if rank == 0:
            rows.extend(compared.table(size, ranks, state.num_bytes, found))
        del state
    dist.destroy_process_group()


def run(compared: Compared, description: str | None, default_size: str) -> None:
    """Read the options and start the ranks, once for each number of them; print and write the results."""
    options = arguments(description, default_size)
    everything: list[Row] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder, torch.multiprocessing.Manager() as manager:
            rows = manager.list()
            spawn(run_rank, (ranks, str(Path(folder) / "store"), options, compared, rows), nprocs=ranks)
            found = list(rows)
        show(f"{ranks} ranks of 1 thread, weights and moments in fp32", found)
        everything += found
    if options.output:
        write(options.output, everything, rounds=options.rounds, sizes={name: SIZES[name] for name in options.sizes})


def arguments(description: str | None, default_size: str) -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the smallest size."""
    parser = argparse.ArgumentParser(description=str(description).partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[default_size])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds before; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.ranks = ["1M"], [2]
        options.rounds, options.warmup = 1, 1
    return options


if __name__ == "__main__":
    run(Compared(measure, table), __doc__, "300M")
