"""Loss of ranks: runs of eight ranks lose some at a random moment, and go on in another layout.

python benchmarks/elastic.py [--cases 60] [--rounds 3] [--seed 0] [--output benchmarks/results/elastic.json]

A case is a layout, a moment of a step (forward, backward, optimizer, saving, replanning) and the processes that are
killed there: 1, 2, or the 4 of a node; 90 cases would be all combinations.  It is survived when the run ends well and
loses no other process, has logged each iteration once with the right number of samples, and every loss equals that of
an undisturbed run in float64 within 1e-10.  The row of the last step before a loss may be missing.  The time is that
from the kill to the end of the first step after it, beside its parts: until the loss is noticed, and what the processes
say of the rest.

Last the step time of runs after a loss, in turns with that of a fresh start in the layout that they go on in, and the
slow-down that they predicted beside the one that came.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from common.corpus import write_random_bytes
from common.report import write

from megatron3d.metrics.journal import read_journal

ROOT = Path(__file__).parents[1]
RANKS, ITERS, TOLERANCE, LIMIT_S, NO_END = 8, 16, 1e-10, 150, -1
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32}
NODES = (range(4), range(4, RANKS))
TRAIN = {"global_batch_size": 16, "micro_batch_size": 2, "train_iters": ITERS, "precision": "fp64"}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "data, ZeRO 1": {"zero_stage": 1},
    "data, ZeRO 3": {"zero_stage": 3},
    "1d": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "3d": {"tensor_parallel_mode": "3d", "tensor_parallel_shape": [2, 2, 2]},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "1d, pipeline, ZeRO 1": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1},
}
# Layout, ranks, and those of them that are killed, of the runs whose steps are timed; with larger ones, in fp32.
TIMED: Sequence[tuple[str, int, tuple[int, ...]]] = (
    ("data, ZeRO 1", 2, (1,)),
    ("data, ZeRO 3", RANKS, (5,)),
    ("1d", RANKS, (3,)),
    ("1d, pipeline, ZeRO 1", RANKS, (4, 5, 6, 7)),
)
TIMED_KEYS = ("model.hidden_size=128", "model.seq_length=64", "train.precision=fp32", "train.train_iters=28")
# First steps of a layout that are not timed.
WARMUP = 4
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
def record():
    from megatron3d.train import build, loop
    connect, step, connected = build.connect, loop.train_step, []
    file = Path({folder!r}, "steps-" + os.environ["RANK"]).open("a", buffering=1)
    def connects(*arguments):
        connected.append(1)
        return connect(*arguments)
    def steps(*arguments, **options):
        result = step(*arguments, **options)
        print(len(connected), time.time(), time.process_time(), file=file)
        return result
    build.connect, loop.train_step = connects, steps
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
    record()
    for each in {kills!r}:
        disturb(*each)
    sys.exit(process.run_program(pretrain_gpt.main))
"""


class Step(NamedTuple):
    """End of a step in one process, and its CPU time until then, in the how manieth layout of this process."""

    layout: int
    end_s: float
    cpu_s: float


class Case(NamedTuple):
    """Processes that are killed at one moment of a run in a layout."""

    layout: str
    moment: str
    call: int
    ranks: tuple[int, ...]


def draw(choose: random.Random, number: int) -> Case:
    """Return a random case; sizes, moments and layouts come in turn, so that few cases have all of them."""
    sizes, (block, place) = (1, 2, 4), divmod(number, 3 * len(MOMENTS))
    moment = [*MOMENTS][place // len(sizes)]
    low, high = MOMENTS[moment][3]
    size = sizes[place % len(sizes)]
    ranks = choose.choice(NODES) if size == len(NODES[0]) else choose.sample(range(RANKS), size)
    return Case([*LAYOUTS][(block + place) % len(LAYOUTS)], moment, choose.randrange(low, high), tuple(sorted(ranks)))


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


def launch(folder: Path, config: Path, num_ranks: int, kills: Sequence[Any], *keys: str) -> tuple[int, str]:
    """Run a program with such kills; return its exit code, None where it does not end, and what it said."""
    (folder / "program.py").write_text(PROGRAM.format(folder=str(folder), kills=kills))
    command = [sys.executable, "-m", "megatron3d.runtime.local_ranks", str(folder / "program.py"), str(num_ranks)]
    settings = ["env", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", f"PYTHONPATH={ROOT}"]
    words = [*settings, *command, "--config", str(config), *keys]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        try:
            said = run.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return NO_END, run.communicate()[0]
    return run.returncode, said


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all steps of a run."""
    return [row for row in read_journal(folder / "run" / "metrics.jsonl") if "lm_loss" in row]


def faults_of(code: int, rows: Sequence[Mapping[str, Any]], expected: Mapping[int, float]) -> Iterator[str]:
    """Yield what is wrong with a run that should have survived."""
    if code:
        yield f"exit code {code}"
    done = [row["iteration"] for row in rows]
    if not done or done != sorted({*done}) or done[-1] != ITERS:
        yield f"iterations {done}"
    for row in rows:
        if row["consumed_samples"] != row["iteration"] * TRAIN["global_batch_size"]:
            yield f"iteration {row['iteration']} after {row['consumed_samples']} samples"
    if (worst := difference(rows, expected)) > TOLERANCE:
        yield f"a loss differs by {worst}"


def difference(rows: Sequence[Mapping[str, Any]], expected: Mapping[int, float]) -> float:
    """Return the largest difference of a loss from that of the undisturbed run."""
    return max((abs(row["lm_loss"] - expected[row["iteration"]]) for row in rows), default=1.0)


def steps_of(folder: Path) -> list[list[Step]]:
    """Return the steps of each process."""
    lines = [[line.split() for line in path.read_text().splitlines()] for path in sorted(folder.glob("steps-*"))]
    return [[Step(int(layout), float(end_s), float(cpu_s)) for layout, end_s, cpu_s in each] for each in lines]


def step_times(folder: Path, layout: int) -> tuple[float, float]:
    """Return the median seconds of a step in a layout, and of the CPU time that it takes of one process."""
    timed = [[step for step in steps if step.layout == layout][WARMUP:] for steps in steps_of(folder)]
    pairs = [pair for steps in timed for pair in pairwise(steps)]
    walls, cpus = zip(*((later.end_s - step.end_s, later.cpu_s - step.cpu_s) for step, later in pairs), strict=True)
    return statistics.median(walls), statistics.median(cpus)


def compare(layout: str, num_ranks: int, killed: tuple[int, ...], data: Path, rounds: int) -> dict[str, Any]:
    """Time steps before and after a loss, and those of a fresh start in the layout after it, in turns."""
    before, after, fresh = (list[tuple[float, float]]() for _ in range(3))
    case = Case(layout, "forward", 12, killed)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder, other = Path(name), Path(name, "fresh")
            other.mkdir()
            code, said = launch(folder, configure(folder, layout, data), num_ranks, kills_of(case), *TIMED_KEYS)
            assert code == 0, said
            journal = read_journal(folder / "run" / "metrics.jsonl")
            (details,) = [row["replan_details"] for row in journal if "replan_details" in row]
            keys = [f"checkpoint.{key}={other / 'run'}" for key in ("save", "load")]
            code, said = launch(other, folder / "run/config.yaml", len(details["members"]), [], *keys)
            assert code == 0, said
            before.append(step_times(folder, 1))
            after.append(step_times(folder, 2))
            fresh.append(step_times(other, 1))
    (before_s, before_cpu_s), (after_s, after_cpu_s), (fresh_s, fresh_cpu_s) = (
        [statistics.median(each) for each in zip(*times, strict=True)] for times in (before, after, fresh)
    )
    return {
        "layout": layout,
        "ranks": num_ranks,
        "layout_after": details["layout"],
        "ranks_after": len(details["members"]),
        "before_ms": 1e3 * before_s,
        "after_ms": 1e3 * after_s,
        "fresh_ms": 1e3 * fresh_s,
        "speed_of_fresh": fresh_s / after_s,
        "cpu_speed_of_fresh": fresh_cpu_s / after_cpu_s,
        "predicted_slowdown": details["slowdown"],
        "measured_slowdown": after_s / before_s,
        "measured_cpu_slowdown": after_cpu_s / before_cpu_s,
    }


def measure(case: Case, data: Path, expected: Mapping[int, float]) -> dict[str, Any]:
    """Return whether a case was survived, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = launch(folder, configure(folder, case.layout, data), RANKS, kills_of(case))
        journal = read_journal(folder / "run" / "metrics.jsonl")
        rows, replans = rows_of(folder), [row["replan_details"] for row in journal if "replan_details" in row]
        killed_s = float((folder / "killed").read_text()) if (folder / "killed").exists() else None
        steps = [step for steps in steps_of(folder) for step in steps]
    later = [step.end_s for step in steps if step.layout > 1 and step.end_s > (killed_s or 0)]
    faults = list(faults_of(code, rows, expected))
    if killed_s is None or not replans:
        faults.append("nothing was lost")
    killed = {rank for _, _, ranks in kills_of(case) for rank in ranks}
    if others := {number for details in replans for number in details["lost"]} - killed:
        faults.append(f"{sorted(others)} were not killed, but are lost")
    row = {**case._asdict(), "survived": not faults, "worst_difference": difference(rows, expected)}
    if faults or killed_s is None:
        return row | {"faults": faults, "said": said[-4000:]}
    last = replans[-1]
    seconds = {"detect": max(last["lost_at"] - killed_s, 0.0), **last["seconds"], "total": min(later) - killed_s}
    source = "memory" if " from memory " in said else "disk" if "> going on from " in said else "scratch"
    return row | {"source": source, "layout_after": last["layout"], "seconds": seconds}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many cases were survived, and median and worst seconds of each part."""
    timed = [row["seconds"] for row in rows if row["survived"]]
    spread = {
        part: {"median": statistics.median(found), "worst": max(found)}
        for part in dict.fromkeys(part for seconds in timed for part in seconds)
        for found in [[seconds[part] for seconds in timed if part in seconds]]
    }
    return {"cases": len(rows), "survived": sum(row["survived"] for row in rows), "seconds": spread}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind whose steps are timed; 0: none")
    parser.add_argument("--quick", action="store_true", help="one case and one round, which only show that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no case begins")
    parser.add_argument("--output", type=Path, help="file that the results are written to")
    arguments = parser.parse_args()
    choose, began_s = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "corpus"
        write_random_bytes(data)
        code, said = launch(folder, configure(folder, "data, ZeRO 1", data), 1, [])
        assert code == 0, said
        expected = {row["iteration"]: row["lm_loss"] for row in rows_of(folder)}
        rows: list[dict[str, Any]] = []
        for number in range(1 if arguments.quick else arguments.cases):
            if time.monotonic() - began_s > arguments.limit_s:
                break
            rows.append(measure(draw(choose, number), data, expected))
            print(rows[-1], flush=True)
        timed = TIMED[:1] if arguments.quick else TIMED
        speed = [compare(*each, data, 1 if arguments.quick else arguments.rounds) for each in timed if arguments.rounds]
    result = summary(rows)
    print(result, *speed, sep="\n")
    if arguments.output:
        write(arguments.output, rows, seed=arguments.seed, **result, speed=speed)


if __name__ == "__main__":
    main()
