"""Fact: a rank's file equals the safetensors library's own, and is never in memory as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.checkpoint.pieces import DTYPES, Piece, checksum
from megatron3d.checkpoint.store import write_boxes

ROOT = Path(__file__).parents[3]
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)


def whole(name, tensor):
    """Return a piece that is a whole tensor."""
    return Piece(name, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), tensor)


@given(
    st.dictionaries(
        NAMES, st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    )
)
def test_the_library_reads_it(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("file") / "rank_00000.safetensors"
    made = {
        name: torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        if dtype != torch.bool
        else torch.randint(0, 2, shape) == 1
        for name, (dtype, shape) in tensors.items()
    }
    stored = write_boxes(path, [whole(name, tensor) for name, tensor in made.items()])
    full = {name: tensor for name, tensor in made.items() if tensor.numel()}
    assert stored.keys() == full.keys()
    assert path.exists() == bool(full)
    read = safetensors.torch.load_file(path) if full else {}
    assert len(read) == len(full)
    for name, tensor in full.items():
        (box,) = stored[name].boxes
        got = read[box.key]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert got.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == content
        assert box.checksum == checksum(tensor) == xxhash.xxh3_64_hexdigest(content)


IN_LITTLE_MEMORY = """
import resource, sys, threading, time
from pathlib import Path
import torch
from megatron3d.checkpoint.store import Piece, load, save
from megatron3d.comm.objects import GroupObjects
from megatron3d.parallel.mesh import Mesh

def memory(kind):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(kind))) * 1024

torch.set_num_threads(1)
rows, boxes = 512, 16
box_bytes = rows * 4096 * 4
values = torch.arange(boxes * rows * 4096, dtype=torch.float32).view(4096, boxes * rows).t()
pieces = [Piece("w", (boxes * rows, 4096), ((i * rows, (i + 1) * rows), (0, 4096)), values[i * rows : (i + 1) * rows])
          for i in range(boxes)]
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + int(float(sys.argv[2]) * box_bytes), before[1]))
folder = save(Path(sys.argv[1]), 1, pieces, {}, GroupObjects(Mesh((("x", 1),))))
resource.setrlimit(resource.RLIMIT_DATA, before)
values.zero_()
held, done = [memory("RssAnon")], threading.Event()

def watch():
    while not done.is_set():
        held.append(memory("RssAnon"))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
load(folder, pieces)
done.set()
watcher.join()
assert values[5000, 7] == 7 * boxes * rows + 5000
assert max(held) - held[0] < 4 * box_bytes, held
print("saved and loaded")
"""


def save_and_load(folder: Path, boxes_of_memory: float) -> subprocess.CompletedProcess[str]:
    """Save and load 16 non-contiguous boxes of 8 MiB, the former with memory for that many boxes."""
    typed = [sys.executable, "-c", IN_LITTLE_MEMORY, str(folder), str(boxes_of_memory)]
    return subprocess.run(typed, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA as Linux has it")
def test_memory_for_a_few_boxes_is_enough(tmp_path):
    """The allocator keeps up to three boxes."""
    done = save_and_load(tmp_path, 4.5)
    assert (done.returncode, done.stdout) == (0, "saved and loaded\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA as Linux has it")
def test_memory_for_half_a_box_is_too_little(tmp_path):
    """Saving fails where it copies the first box, so that the limit of the other test is one."""
    done = save_and_load(tmp_path, 0.5)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(rf"^RuntimeError: rank 0: .*you tried to allocate {2**23} bytes", done.stderr, re.MULTILINE)


def test_a_repeated_box_and_an_existing_file_are_refused(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    w = whole("w", torch.ones(2))
    with pytest.raises(AssertionError, match="was given twice"):
        write_boxes(path, [w, w])
    write_boxes(path, [w])
    with pytest.raises(FileExistsError):
        write_boxes(path, [w])
