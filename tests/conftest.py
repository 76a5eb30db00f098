"""Fixtures of all tests, and the selection of slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from megatron3d.parallel.mesh import Mesh
from tests.support.pool import Pool
from tests.support.processes import kept_handlers
from tests.support.thread_ranks import ObjectThreadComm, run_on_threads

UNIT = Path(__file__).parent / "unit"
FAST_FILES = ("test_architecture.py", "test_words.py")
ROWS_FILE = "test_equality.py"

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole matrices of tests/slow, too (half an hour)")


def fixtures_of(item: pytest.Item) -> list[str]:
    """Return the names of all fixtures that a test uses, directly or not."""
    return getattr(item, "fixturenames", [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that launch ranks or programs as slow, and deselect those marked `full` unless --full was given.

    A worker of pytest-xdist takes whole files, whose tests may share fixtures, but single rows of the covering array.
    One worker takes all tests that use the pool: two pools of eight processes would wait for each other.
    """
    for item in items:
        is_unit, uses_pool = UNIT in item.path.parents or item.path.name in FAST_FILES, "pool" in fixtures_of(item)
        if not is_unit or uses_pool:
            item.add_marker(pytest.mark.slow)
        if item.path.name != ROWS_FILE:
            item.add_marker(pytest.mark.xdist_group("pool" if uses_pool else str(item.path)))
    left_out = [] if config.getoption("--full") else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Restore signal handlers: a run that was stopped ignores further signals while its process ends."""
    with kept_handlers():
        return (yield)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Return eight worker processes that run functions as the ranks of a gloo world."""
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[Mesh, Callable[[ObjectThreadComm], Any]], list[Any]]:
    """Return the function that runs `action(comm)` as the ranks of a mesh, in threads of this process."""
    return run_on_threads


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
