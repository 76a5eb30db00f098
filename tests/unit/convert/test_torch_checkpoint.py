"""Fact: torch.distributed.checkpoint loads what `to-dcp` writes bit for bit, with the code of docs/checkpoints.md."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from megatron3d.checkpoint.store import Piece, save
from megatron3d.parallel.mesh import Mesh
from tests.support.thread_ranks import ObjectThreadComm, run_on_threads
from tests.support.tiny_run import ROOT, tree
from tools import convert_checkpoint

TENSORS = {
    "model.a.weight": torch.arange(12.0).reshape(4, 3).to(torch.bfloat16),
    "model.b.bias": torch.tensor([0.0, -0.0, torch.inf, torch.nan]),
    "model.router.expert_bias": torch.arange(4, dtype=torch.float64) / 3,
    "optimizer.exp_avg.a.weight": torch.full((4, 3), 1e-20),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save the tensors from two ranks, of which each has half of the rows."""

    def save_rows(comm: ObjectThreadComm) -> Path:
        low, high = ((0, 2), (2, 4))[comm.mesh.rank]
        boxes = {name: ((low, high), *((0, size) for size in whole.shape[1:])) for name, whole in TENSORS.items()}
        pieces = [Piece(name, tuple(TENSORS[name].shape), box, TENSORS[name][low:high]) for name, box in boxes.items()]
        return save(tmp_path / "run", 3, pieces, {}, comm)

    return run_on_threads(Mesh((("x", 2),)), save_rows)[0].parent


def convert(source: Path, target: Path, *options: str) -> int:
    return convert_checkpoint.main(["to-dcp", "--input", str(source), "--output", str(target), *options])


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_code_of_the_page_loads_every_bit(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    assert convert(run, target) == 0
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    found: dict[str, dict[str, Tensor]] = {}
    exec(shown.replace("runs/one-dcp", str(target)), found)
    assert {name: (each.dtype, bits(each)) for name, each in found["state"].items()} == {
        name: (each.dtype, bits(each)) for name, each in TENSORS.items()
    }
    assert list(found["weights"]) == ["a.weight", "b.bias", "router.expert_bias"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_is_loaded_alone(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    assert convert(run, target) == 0
    state = {"optimizer.exp_avg.a.weight": torch.zeros(4, 3)}
    load(state, storage_reader=FileSystemReader(target))
    assert torch.equal(state["optimizer.exp_avg.a.weight"], TENSORS["optimizer.exp_avg.a.weight"])


def test_a_damaged_checkpoint_leaves_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(run.glob("iter_*/rank_00001.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    before = tree(tmp_path)
    assert convert(run, tmp_path / "dcp") == 2
    assert "rank_00001.safetensors is missing or damaged" in capsys.readouterr().err and tree(tmp_path) == before


def test_what_has_no_effect_or_exists_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(run, tmp_path / "dcp", "--dtype", "bf16", "--tokenizer-type", "ByteTokenizer") == 2
    said = capsys.readouterr().err
    assert "--dtype: not used with to-dcp" in said and "--tokenizer-type: not used with to-dcp" in said
    (tmp_path / "dcp").mkdir()
    assert convert(run, tmp_path / "dcp") == 2 and "exists already" in capsys.readouterr().err


PROGRAM = """
import resource, sys
from tools.convert_checkpoint import main
peaks = []
for run in sys.argv[1:]:
    assert main(["to-dcp", "--input", run, "--output", run + "_dcp"]) == 0
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    """The second checkpoint has 24 tensors of 8 MiB."""
    runs = [tmp_path / "small", tmp_path / "large"]
    whole = torch.ones(2**21)
    for folder, count in zip(runs, (1, 24), strict=True):
        values = whole[:8] if count == 1 else whole
        shape = tuple(values.shape)
        pieces = [Piece(f"model.{place}", shape, ((0, *shape),), values) for place in range(count)]
        run_on_threads(Mesh((("x", 1),)), partial(save, folder, 0, pieces, {}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, runs)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert int(done.stdout.split()[-1]) < 5 * whole.nbytes


@pytest.mark.parametrize("direction", ["from-hf", "to-hf", "config", "to-dcp"])
@pytest.mark.parametrize("place", ["", "iter_0000003"])
def test_a_folder_of_torchs_format_is_named(
    direction: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM's torch_dist has such folders; nothing in them is read."""
    source = tmp_path / "megatron"
    (source / place).mkdir(parents=True)
    (source / place / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    if place:
        (source / "latest_checkpointed_iteration.txt").write_text("3")
    asked = ["--input", str(source), "--output", str(tmp_path / "out")]
    assert convert_checkpoint.main([direction, *asked]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "torch_dist of Megatron-LM" in said and "from-megatron" in said and "from-hf" in said
    )
    assert not (tmp_path / "out").exists()
