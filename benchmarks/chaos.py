"""Fault injection: survival of random kills and damaged checkpoints, with the losses of an undisturbed run.

python benchmarks/chaos.py [--rounds 25] [--seed 0] [--output benchmarks/results/chaos.json]

A round is a run of two processes under torchrun.  One of them is killed (SIGKILL) at a random moment, twice, and
torchrun restarts both.  Then the newest checkpoint is damaged and the run is restarted, twice.  A fault is survived
when the run reaches its end and the loss of every step equals that of a run without faults, to the last digit.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from common.corpus import write_text
from common.report import show, write

from megatron3d.metrics.journal import read_journal

LAST_WAIT_S = 120.0
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
LAYOUTS: dict[str, dict[str, object]] = {
    "data parallel, ZeRO 1": {"zero_stage": 1},
    "data parallel, ZeRO 3": {"zero_stage": 3},
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


class Trial(NamedTuple):
    """Ranks and iterations of a run, and how often it is killed and its newest checkpoint damaged."""

    ranks: int
    iterations: int
    kills: int
    damages: int


FULL, QUICK = Trial(2, 20, 2, 2), Trial(1, 6, 1, 0)
Damage = Callable[[Path, random.Random], object]


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def a_file(folder: Path, choose: random.Random) -> Path:
    """Return a random file of tensors of a checkpoint."""
    return choose.choice(sorted(folder.glob("*.safetensors")))


DAMAGE: dict[str, Damage] = {
    "a flipped bit": lambda folder, choose: flip(a_file(folder, choose), choose.randrange(2**40)),
    "a flipped bit in the index": lambda folder, choose: flip(folder / "index.json", choose.randrange(2**40)),
    "a truncated file": lambda folder, choose: os.truncate(a_file(folder, choose), choose.randrange(5000)),
    "a missing file": lambda folder, choose: a_file(folder, choose).unlink(),
    "a missing index": lambda folder, _: (folder / "index.json").unlink(),
    "an empty index": lambda folder, _: (folder / "index.json").write_text(""),
    "a missing folder": lambda folder, _: shutil.rmtree(folder),
    "a lost tracker": lambda folder, _: (folder.parent / "latest_checkpointed_iteration.txt").unlink(missing_ok=True),
    "a garbled tracker": lambda folder, _: (folder.parent / "latest_checkpointed_iteration.txt").write_bytes(b"\0"),
}


class Place:
    """Folder with a corpus and the configurations of runs on it."""

    def __init__(self, folder: Path, trial: Trial) -> None:
        self.folder, self.trial = folder, trial
        text, corpus = write_text(folder / "text.txt"), folder / "corpus"
        tool = [sys.executable, "tools/preprocess_data.py", "--input", str(text), "--output-prefix", str(corpus)]
        subprocess.run([*tool, "--tokenizer-type", "ByteTokenizer", "--workers", "1"], check=True, capture_output=True)
        (self.prefix,) = (path.with_suffix("") for path in folder.glob("*.bin"))

    def config(self, name: str, layout: str, in_background: bool) -> Path:
        """Write the configuration of a run that saves every second iteration to the folder of its name."""
        train = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": self.trial.iterations}
        run = str(self.folder / name)
        sections = {
            "model": MODEL,
            "parallel": LAYOUTS[layout],
            "train": train,
            "data": {"data_path": str(self.prefix), "tokenizer_type": "ByteTokenizer", "split": "100,0,0"},
            "checkpoint": {"save": run, "load": run, "save_interval": 2, "async_save": in_background},
            "logging": {"log_interval": 1},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path


@contextmanager
def launched(config: Path, trial: Trial) -> Iterator[subprocess.Popen[str]]:
    """Start the run under torchrun, which restarts it after a failure."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.ranks}"]
    command = [*launcher, f"--max-restarts={trial.kills}", "pretrain_gpt.py", "--config", str(config)]
    log = config.with_suffix(".err").open("a")
    with (
        log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def train(
    config: Path, trial: Trial, moments: Sequence[tuple[int, float]] = (), choose: random.Random | None = None
) -> tuple[bool, int, list[str]]:
    """Return whether the run reached its end, the number of kills, and the lines of its output.

    `moments` are (iteration, seconds): a random rank is killed that long after the iteration or a later one is logged.
    """
    left, said = list(moments), list[str]()
    with launched(config, trial) as process:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            said.append(line)
            step = re.search(r"iteration +(\d+)/", line)
            if left and choose and step and int(step[1]) >= left[0][0]:
                time.sleep(left.pop(0)[1])
                kill_one(process.pid, choose)
        return process.wait(LAST_WAIT_S) == 0, len(moments) - len(left), said


def kill_one(launcher: int, choose: random.Random) -> None:
    """Kill a random one of a launcher's processes."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    if children:
        os.kill(int(choose.choice(children)), signal.SIGKILL)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return iteration and loss of every step."""
    return [(row["iteration"], row["lm_loss"]) for row in read_journal(folder / "metrics.jsonl") if "lm_loss" in row]


class Tally:
    """Number of faults, and of survived faults, by kind."""

    def __init__(self) -> None:
        self.tried, self.survived = collections.Counter[str](), collections.Counter[str]()

    def count(self, fault: str, good: bool, times: int = 1) -> None:
        """Count the outcome of a fault."""
        self.tried[fault] += times
        self.survived[fault] += times * good

    def rows(self) -> list[dict[str, object]]:
        """Return a row per kind of fault, and their sum."""
        rows = [{"fault": name, "tried": n, "survived": self.survived[name]} for name, n in sorted(self.tried.items())]
        return [*rows, {"fault": "all", "tried": self.tried.total(), "survived": self.survived.total()}]


def one_round(
    number: int, place: Place, choose: random.Random, references: dict[str, list[tuple[int, float]]], tally: Tally
) -> None:
    """Kill processes, then damage checkpoints."""
    trial = place.trial
    layout, in_background = list(LAYOUTS)[number % len(LAYOUTS)], bool(number // len(LAYOUTS) % 2)
    if layout not in references:
        done, _, said = train(place.config(f"reference{number}", layout, False), trial)
        assert done, "".join(said)
        references[layout] = losses(place.folder / f"reference{number}")
    name = f"run{number}"
    config, run = place.config(name, layout, in_background), place.folder / name
    moments = sorted((choose.randint(1, trial.iterations - 1), choose.uniform(0, 0.2)) for _ in range(trial.kills))
    done, kills, said = train(config, trial, moments, choose)
    good = done and losses(run) == references[layout]
    tally.count(f"killed, {'asynchronous' if in_background else 'synchronous'} saves", good, kills)
    if not good:
        keep(config, f"{layout}, killed at {moments}", said)
    for _ in range(trial.damages):
        fault = choose.choice(list(DAMAGE))
        newest = max(run.glob("iter_*"))
        DAMAGE[fault](newest, choose)
        done, _, said = train(config, trial)
        good = done and losses(run) == references[layout]
        tally.count(fault, good)
        if not good:
            keep(config, f"{layout}, {fault} of {newest.name}", said)
    shutil.rmtree(run, ignore_errors=True)


def keep(config: Path, what: str, said: Sequence[str]) -> None:
    """Print the log of a run that did not survive."""
    print(f"NOT SURVIVED: {what}\n{''.join(said[-30:])}{config.with_suffix('.err').read_text()[-4000:]}", flush=True)


def main() -> int:
    """Run all rounds; return exit code 1 where a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    trial, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    choose, tally = random.Random(options.seed), Tally()
    references: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), trial)
        for number in range(rounds):
            one_round(number, place, choose, references, tally)
            print(f"round {number + 1} of {rounds}: {tally.rows()[-1]}", flush=True)
            if options.output:
                write(options.output, tally.rows(), rounds=number + 1, seed=options.seed, iterations=trial.iterations)
    show("faults", tally.rows())
    return int(tally.tried != tally.survived)


if __name__ == "__main__":
    sys.exit(main())
