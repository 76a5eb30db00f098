"""Fact: any description of a cluster is read, or refused with short messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron3d.errors import UserError
from megatron3d.forecast.time.hardware import CLUSTERS, FOLDER, file_names, load_accelerator, load_cluster

SELENE = (CLUSTERS / "selene.yaml").read_text()
BAD = {
    "nothing": ("", "valid dictionary"),
    "a list": ("[]", "valid dictionary"),
    "not YAML": ("levels: [", "not YAML"),
    "brackets": ("[" * 100_000, "more than 20 levels of lists and mappings"),
    "an alias in its own anchor": ("a: &a [*a]", "every alias written out"),
    "a Python object": ("!!python/object:x {}", "not YAML"),
    "too many ranks": (SELENE.replace("ranks: 8", "ranks: 10000000000000"), "levels.0.ranks"),
    "no ranks": (SELENE.replace("ranks: 8", "ranks: 0"), "levels.0.ranks"),
    "levels in another order": (SELENE.replace("ranks: 8", "ranks: 8000"), "more ranks than the one before"),
    "no bandwidth": (SELENE.replace("gb_s: 230", "gb_s: 0"), "levels.0.gb_s"),
    "infinite bandwidth": (SELENE.replace("gb_s: 230", "gb_s: .inf"), "levels.0.gb_s"),
    "a latency of nan": (SELENE.replace("latency_us: 3", "latency_us: .nan"), "levels.0.latency_us"),
    "options of lists": (SELENE + "slurm: {options: {" + ",".join(f"k{n}: [1]" for n in range(3000)) + "}}\n", "slurm"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_description_is_refused(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_cluster(str(tmp_path / "mine.yaml"))
    assert message in str(caught.value)
    assert len(caught.value.problems) <= 10 and max(map(len, caught.value.problems)) < 1000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    names = [f"{tmp_path}/fifo.yaml", f"{tmp_path}/bytes.yaml", f"{tmp_path}/absent.yaml", "x" * 300, "a\0", "", "../x"]
    for name in names:
        with pytest.raises(UserError):
            load_cluster(name)


@pytest.mark.parametrize("name", file_names(CLUSTERS))
def test_the_clusters_of_the_package_are_read(name: str) -> None:
    assert load_accelerator(load_cluster(name).accelerator).kernels


def test_a_cluster_may_name_the_file_of_its_accelerator(tmp_path: Path) -> None:
    """The path starts at the cluster's file; an accelerator without kernel rates is refused by its file."""
    (tmp_path / "parts").mkdir()
    own = tmp_path / "parts" / "mine.yml"
    own.write_text((FOLDER / "a100.yaml").read_text().replace("memory_gib: 79.1", "memory_gib: 60"))
    (tmp_path / "cluster.yaml").write_text(SELENE.replace("accelerator: a100", "accelerator: parts/mine.yml"))
    cluster = load_cluster(str(tmp_path / "cluster.yaml"))
    kernels = load_accelerator(cluster.accelerator).kernels
    assert kernels is not None and kernels.memory_gib == 60
    own.write_text((FOLDER / "l4.yaml").read_text())
    with pytest.raises(UserError, match=r"only its peak is known; add `kernels` to .*parts/mine.yml"):
        load_accelerator(cluster.accelerator)
    own.unlink()
    with pytest.raises(UserError, match="there is none"):
        load_accelerator(cluster.accelerator)


def test_a_node_is_the_level_of_that_name() -> None:
    """Racks of 72 on one NVLink have nodes of 4, which SLURM starts."""
    sizes = {name: load_cluster(name).node_ranks for name in file_names(CLUSTERS)}
    assert sizes == {
        "dgx_a100_40gb": 8,
        "dgx_b200": 8,
        "dgx_h200": 8,
        "eos": 8,
        "gb200_nvl72": 4,
        "longhorn": 4,
        "perlmutter": 4,
        "selene": 8,
    }
