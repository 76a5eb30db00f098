"""Fixtures of all tests, and the selection of slow tests."""

from __future__ import annotations

import gc
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from megatron3d.parallel.mesh import Mesh
from tests.support.pool import Pool
from tests.support.processes import kept_handlers
from tests.support.thread_ranks import ObjectThreadComm, run_on_threads

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "tests" / "unit"
GPU = Path(__file__).parent / "gpu"
FAST_FILES = ("test_architecture.py", "test_words.py")
ROWS_FILE = "/test_equality.py"

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU from all tests but those of tests/gpu, which are run alone: the others expect the CPU's numbers."""
    chosen = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if not all(path == GPU or GPU in path.parents for path in chosen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print which torch the tests run with, which pytest's own header would leave out with -q."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")  # workers of xdist have none
    if terminal is not None:
        terminal.write_line(f"torch {torch.__version__}, Python {platform.python_version()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="run tests/gpu with the CPU in the place of the GPU")
    parser.addoption("--full", action="store_true", help="run the whole matrices of tests/slow, too (half an hour)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that launch ranks or programs as slow, and deselect those marked `full` unless --full was given."""
    for item in items:
        is_unit = UNIT in item.path.parents or item.path.name in FAST_FILES
        if not is_unit or "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    left_out = [] if config.getoption("--full") else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives workers whole files, whose tests may share fixtures, but single rows of the covering array.

    One worker takes all files that use the pool: two pools of eight processes would wait for each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.endswith(ROWS_FILE):
            return nodeid
        return "pool" if re.search(r"\(.*\bpool\b.*\)", (ROOT / path).read_text(encoding="utf-8")) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler for `--dist loadfile`."""
    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of later garbage collections, which took a sixth of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free everything when it ends: triton would report what is left as leaks."""
    gc.unfreeze()


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
