"""Loss of ranks: runs of eight ranks lose some at a random moment, and go on in another layout.

python benchmarks/elastic.py [--cases 12] [--seed 0] [--output benchmarks/results/elastic.json]

A case is a layout, a moment of a step (forward, backward, optimizer, saving, replanning) and a number of processes that
are killed there (1, 2, or 4 as in a node).  It is survived when the run ends well and every logged loss equals that of
an undisturbed run in float64 within 1e-10, which a sample that is lost or doubled would change.  The time is that from
the kill to the first step after it: until the loss is noticed, and what the processes say of the rest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from common.corpus import write_random_bytes
from common.report import write

from megatron3d.metrics.journal import read_journal

ROOT = Path(__file__).parents[1]
RANKS, ITERS, TOLERANCE, LIMIT_S = 8, 16, 1e-10, 240
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32}
TRAIN = {"global_batch_size": 16, "micro_batch_size": 2, "train_iters": ITERS, "precision": "fp64"}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "data, ZeRO 1": {"zero_stage": 1},
    "data, ZeRO 3": {"zero_stage": 3},
    "1d": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "3d": {"tensor_parallel_mode": "3d", "tensor_parallel_shape": [2, 2, 2]},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "1d, pipeline, ZeRO 1": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1},
}
# Functions before which processes end: module, object (empty: the module), name, and calls from which one is chosen.
MOMENTS: Mapping[str, tuple[str, str, str, tuple[int, int]]] = {
    "forward": ("megatron3d.train.step", "", "begin_passes", (4, ITERS)),
    "backward": ("megatron3d.zero.buffers", "Buffers", "reduce_grads", (4, ITERS)),
    "optimizer": ("megatron3d.optim.optimizer", "Optimizer", "_average", (4, ITERS)),
    "saving": ("megatron3d.checkpoint.async_saver", "", "save", (1, 3)),
    "replanning": ("megatron3d.train.build", "", "connect", (2, 3)),
}
PROGRAM = """
import os, signal, sys, time
from importlib import import_module
from pathlib import Path
from megatron3d.runtime import process
import pretrain_gpt
preload = pretrain_gpt.preload
def disturb(moment, call, ranks):
    module, owner, name, _ = moment
    place = getattr(import_module(module), owner) if owner else import_module(module)
    inner, calls = getattr(place, name), []
    def disturbed(*arguments, **options):
        calls.append(1)
        if int(os.environ["RANK"]) in ranks and len(calls) == call:
            Path({folder!r}, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments, **options)
    setattr(place, name, disturbed)
if __name__ == "__main__":
    for each in {kills!r}:
        disturb(*each)
    sys.exit(process.run_program(pretrain_gpt.main))
"""


class Case(NamedTuple):
    """Processes that are killed at one moment of a run in a layout."""

    layout: str
    moment: str
    call: int
    ranks: tuple[int, ...]


def draw(choose: random.Random, number: int) -> Case:
    """Return a random case; moments and layouts come in turn, so that few cases have all of them."""
    moment = [*MOMENTS][number % len(MOMENTS)]
    low, high = MOMENTS[moment][3]
    ranks = tuple(sorted(choose.sample(range(RANKS), choose.choice((1, 2, 4)))))
    return Case([*LAYOUTS][number % len(LAYOUTS)], moment, choose.randrange(low, high), ranks)


def kills_of(case: Case) -> list[Any]:
    """Return what the program is told; a replan has a loss before it, of the highest rank that is not killed then."""
    kills = [(MOMENTS[case.moment], case.call, case.ranks)]
    first = max({*range(RANKS)} - {*case.ranks})
    return kills + [(MOMENTS["forward"], 6, (first,))] * (case.moment == "replanning")


def configure(folder: Path, layout: str, data: Path) -> Path:
    """Write the configuration of a run in a layout that saves to `folder`."""
    checkpoint = {"save": str(folder / "run"), "load": str(folder / "run"), "save_interval": 4, "async_save": True}
    sections = {
        "model": MODEL,
        "train": {**TRAIN, "elastic": True},
        "optimizer": {"lr": 1e-3},
        "parallel": dict(LAYOUTS[layout]),
        "data": {"tokenizer_type": "ByteTokenizer", "data_path": str(data), "split": "100,0,0"},
        "checkpoint": {**checkpoint, "in_memory_interval": 2},
        "logging": {"log_interval": 1, "peak_tflops": 0.01, "straggler_factor": None},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def launch(folder: Path, layout: str, data: Path, num_ranks: int, kills: Sequence[Any]) -> tuple[int, str]:
    """Run a program with such kills; return its exit code and what it said."""
    (folder / "program.py").write_text(PROGRAM.format(folder=str(folder), kills=kills))
    config = configure(folder, layout, data)
    command = [sys.executable, "-m", "megatron3d.runtime.local_ranks", str(folder / "program.py"), str(num_ranks)]
    settings = ["env", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", f"PYTHONPATH={ROOT}"]
    words = [*settings, *command, "--config", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def losses_of(folder: Path) -> dict[int, float]:
    """Return the logged loss of each iteration."""
    rows = read_journal(folder / "run" / "metrics.jsonl")
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def measure(case: Case, data: Path, expected: Mapping[int, float]) -> dict[str, Any]:
    """Return whether a case was survived, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = launch(folder, case.layout, data, RANKS, kills_of(case))
        rows = read_journal(folder / "run" / "metrics.jsonl")
        losses, replans = losses_of(folder), [row["replan_details"] for row in rows if "replan_details" in row]
        killed = float((folder / "killed").read_text()) if (folder / "killed").exists() else None
    worst = max((abs(loss - expected[iteration]) for iteration, loss in losses.items()), default=1.0)
    survived = code == 0 and ITERS in losses and worst < TOLERANCE
    row: dict[str, Any] = {**case._asdict(), "survived": survived, "worst_difference": worst, "code": code}
    row["missing_rows"] = sorted({*range(1, ITERS + 1)} - {*losses})
    row["source"] = "memory" if " from memory " in said else "disk or scratch"
    if not survived:
        return row | {"said": said[-1500:]}
    if killed is None or not replans:
        return row | {"seconds": {}}
    last = replans[-1]
    seconds = {"detect": max(last["lost_at"] - killed, 0.0), **last["seconds"]}
    return row | {"layout_after": last["layout"], "seconds": seconds | {"total": sum(seconds.values())}}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many cases were survived, and median and worst seconds of each part."""
    timed = [row["seconds"] for row in rows if row["survived"] and row["seconds"]]
    parts = dict.fromkeys(part for seconds in timed for part in seconds)
    spread = {
        part: {"median": statistics.median(found), "worst": max(found)}
        for part in parts
        for found in [[seconds[part] for seconds in timed if part in seconds]]
    }
    return {"cases": len(rows), "survived": sum(row["survived"] for row in rows), "seconds": spread}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="one case, which only shows that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no case begins")
    parser.add_argument("--output", type=Path, help="file that the results are written to")
    arguments = parser.parse_args()
    choose, began_s = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "corpus"
        write_random_bytes(data)
        code, said = launch(folder, "data, ZeRO 1", data, 1, [])
        assert code == 0, said
        expected = losses_of(folder)
        rows: list[dict[str, Any]] = []
        for number in range(1 if arguments.quick else arguments.cases):
            if time.monotonic() - began_s > arguments.limit_s:
                break
            rows.append(measure(draw(choose, number), data, expected))
            print(rows[-1], flush=True)
    result = summary(rows)
    print(result)
    if arguments.output:
        write(arguments.output, rows, seed=arguments.seed, **result)


if __name__ == "__main__":
    main()
