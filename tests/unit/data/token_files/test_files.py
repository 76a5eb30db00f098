"""Fact: a file appears complete or not at all, and two concurrent writers of one file do not mix."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from megatron3d.data.token_files.files import AppendOnlyFile, replace_output, with_suffix
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.errors import UserError


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x"
    with replace_output(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), replace_output(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and names(path.parent) == ["x"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    """This also holds where the disk is full only at the final flush."""
    path, before = tmp_path / "x", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"old")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        with pytest.raises(UserError, match=r"x: cannot be written \(File too large\)"), replace_output(path) as file:
            file.write(b"newer")
            file.write(b"!")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["x"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replace_output(path) as first:
        first.write(b"first")
        with pytest.raises(UserError, match="another process is at work"), replace_output(path):
            pass
    assert path.read_bytes() == b"first"
    growing = AppendOnlyFile(path)
    growing.append(b"one")
    with pytest.raises(UserError, match="another process is at work"):
        AppendOnlyFile(path)
    growing.append(b"two")
    growing.close()
    again = AppendOnlyFile(path, 3)
    again.append(b"!")
    assert path.read_bytes() == b"one!"
    path.rename(tmp_path / "final")
    path.write_bytes(b"of another")
    again.discard()
    assert path.read_bytes() == b"of another" and (tmp_path / "final").read_bytes() == b"one!"


def test_a_refused_writer_leaves_existing_files(tmp_path: Path) -> None:
    other = AppendOnlyFile(tmp_path / "x.lengths.partial")
    with pytest.raises(UserError, match="another process is at work"):
        IndexedWriter(tmp_path / "x", np.dtype("<u2"))
    assert names(tmp_path) == ["x.lengths.partial"]
    other.close()


def test_a_prefix_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"no name of a file; use for example corpus"):
        with_suffix(Path(), ".bin")
    for prefix, suffix in (("a", "_b/c"), ("a", "_\0"), ("\0", ".bin"), ("\ud800", ".bin")):
        with pytest.raises(UserError, match="cannot be the name of a file"):
            with_suffix(Path(prefix), suffix)
    assert with_suffix(Path("\udcff"), ".bin").name == "\udcff.bin"
