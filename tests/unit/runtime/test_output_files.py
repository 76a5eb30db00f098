"""Fact: an output that is an input, under whatever name, is refused, and one that exists unless it may be replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import require_free

NAMES: dict[str, Callable[[Path], Path]] = {
    "the same": lambda path: path,
    "not normalized": lambda path: path.parent / "." / path.name,
    "absolute": lambda path: path.resolve(),
    "through a parent": lambda path: path.parent / "folder" / ".." / path.name,
    "a link to it": lambda path: path.parent / "link",
    "a hard link": lambda path: path.parent / "hard",
    "through a link to its folder": lambda path: path.parent / "linked" / path.name,
}


@pytest.mark.parametrize("name", NAMES)
def test_an_input_is_never_replaced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("a")
    path.write_text("kept")
    (tmp_path / "folder").mkdir()
    Path("link").symlink_to("a")
    Path("linked").symlink_to(tmp_path)
    os.link("a", "hard")
    with pytest.raises(UserError, match="also an input"):
        require_free("--output", [NAMES[name](path)], [path], overwrite=True)


def test_an_input_that_is_not_there_yet_is_compared_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(UserError, match="the same file as"):
        require_free("--output", [tmp_path / "linked" / "a"], [tmp_path / "a"])


def test_what_exists_needs_overwrite(tmp_path: Path) -> None:
    there, broken = tmp_path / "there", tmp_path / "broken"
    there.touch()
    broken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError) as caught:
        require_free("--output", [there, broken, tmp_path / "free"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [f"--output {there}", f"--output {broken}"]
    assert all("--overwrite" in problem for problem in caught.value.problems)
    require_free("--output", [there, broken], overwrite=True)


def test_devices_are_written_to() -> None:
    require_free("--output", [Path(os.devnull)])
