"""Pool of worker processes, started once per test session, that run functions as the ranks of a gloo world."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

NUM_WORKERS = 8
TIMEOUT_S = 300


def _worker(tasks: Queue[Any], results: Queue[Any]) -> None:
    import torch

    from megatron3d.runtime.machine import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    while (task := tasks.get()) is not None:
        rank, world_size, store, fn, args = task
        try:
            results.put((rank, True, _as_rank(rank, world_size, store, fn, args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


def _as_rank(rank: int, world_size: int, store: str | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    if world_size == 1 or store is None:
        return fn(rank, world_size, *args)
    timeout = timedelta(seconds=TIMEOUT_S - 60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        return fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
        gc.collect()  # a process group holds three threads that wake up a hundred times a second
        gc.freeze()  # only modules are left; scanning them took longer than most tests


class Pool:
    """Pool of workers: `run(fn, world_size, *args)` returns `fn(rank, world_size, *args)` of every rank in order."""

    def __init__(self, folder: Path) -> None:
        self._context = mp.get_context("forkserver")  # import torch and the package once, not in every worker
        self._context.set_forkserver_preload(["torch.distributed", "tests.support.equality", "tests.support.tiny_run"])
        self._folder = folder
        self._workers: list[Any] = []
        self._count = 0

    def _start(self) -> None:
        self._results: Queue[Any] = self._context.Queue()
        self._tasks: list[Queue[Any]] = [self._context.Queue() for _ in range(NUM_WORKERS)]
        self._workers = [
            self._context.Process(target=_worker, args=(tasks, self._results), daemon=True) for tasks in self._tasks
        ]
        for worker in self._workers:
            worker.start()

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, meet: bool = True) -> list[Any]:
        """Run a function on every rank.

        Raises AssertionError with the traceback of the first rank that failed, or after `TIMEOUT_S`.  Where `meet` is
        False the ranks have no process group yet: `fn` initializes one.
        """
        if not self._workers:
            self._start()
        self._count += 1
        store = str(self._folder / f"store{self._count}") if meet else None
        for rank in range(world_size):
            self._tasks[rank].put((rank, world_size, store, fn, args))
        try:
            answers = [self._results.get(timeout=TIMEOUT_S) for _ in range(world_size)]
        except BaseException:
            self.close()
            raise
        for rank, succeeded, value in answers:
            assert succeeded, f"rank {rank} of {world_size} failed first:\n{value}"
        return [value for _, _, value in sorted(answers, key=lambda answer: answer[0])]

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []
