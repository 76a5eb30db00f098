"""Fact: under a real SLURM, a run requeued at its time limit ends with the numbers of a run that never stopped.

A job that cannot make progress is not requeued; an array job writes the token files that one process writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron3d.errors import ExitCode
from tests.support.pool import Pool
from tests.support.slurm import CLUSTER, Job, Slurm, missing
from tests.support.tiny_run import ROOT, in_run, run_as_rank, steps, stored, write_config
from tools import make_slurm, preprocess_data

NUM_ITERS = 50
LAYOUT = ["parallel.tensor_model_parallel_size=2", f"train.train_iters={NUM_ITERS}", "model.hidden_dropout=0.1"]
# Two seconds per step in a launch from iteration 0, so that the time limit comes before the end.
SLOW = """
import sys, time
sys.path.insert(0, {root!r})
import pretrain_gpt
from megatron3d.runtime import process
from megatron3d.train import loop

train, step = loop.train, loop.train_step
def slow_train(run, *arguments, **options):
    pause_s = 0.0 if run.state.iteration else 2.0
    loop.train_step = lambda *args, **named: (time.sleep(pause_s), step(*args, **named))[1]
    return train(run, *arguments, **options)
loop.train = slow_train
sys.exit(process.run_program(pretrain_gpt.main))
"""

# In the first launch rank 1 is killed in its fourth step.
LOSING = """
import os, signal, sys
sys.path.insert(0, {root!r})
import pretrain_gpt
from megatron3d.runtime import process
from megatron3d.train import loop

step = loop.train_step
def losing_step(state, *args, **named):
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and process.launcher_env().rank == 1 and state.iteration == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(state, *args, **named)
loop.train_step = losing_step
sys.exit(process.run_program(pretrain_gpt.main))
"""
SPARE = ["train.train_iters=6", "checkpoint.save_interval=2", "--spares", "1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(Slurm(tmp_path_factory.mktemp("slurm"))) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("jobs"))


def submit(slurm: Slurm, config: Path, name: str, nodes: int, program: str | None, *more: str) -> str:
    """Write and submit a job, optionally with another program in place of pretrain_gpt.py; return its number."""
    here = config.parent
    (here / "two.yaml").write_text(CLUSTER)
    job = here / f"{name}.sbatch"
    typed = ["--config", str(config), "--cluster", str(here / "two.yaml"), "--nodes", str(nodes), "--time", "10"]
    typed += ["--python", sys.executable, "--warn", "30", "--sbatch", f"output={here}/{name}.log", "--output", str(job)]
    assert make_slurm.main([*typed, *in_run(str(here / name)), *more]) == 0
    if program is not None:
        (here / f"{name}.py").write_text(program.format(root=str(ROOT)))
        job.write_text(job.read_text().replace(" pretrain_gpt.py ", f" {here}/{name}.py "))
    return slurm.run("sbatch", "--parsable", str(job)).strip()


def said(config: Path, name: str) -> str:
    """Return the output of a job."""
    return (config.parent / f"{name}.log").read_text()


@dataclass(frozen=True)
class Jobs:
    """Numbers of jobs that run concurrently, and the folder of the corpora."""

    limited: str
    wrong: str
    crashing: str
    unfit: str
    spare: str
    merging: str
    corpora: Path


@pytest.fixture(scope="module")
def jobs(slurm: Slurm, config: Path) -> Jobs:
    """Submit all jobs at once, since they mostly wait."""
    return Jobs(
        submit(slurm, config, "limited", 2, SLOW, *LAYOUT),
        submit(slurm, config, "wrong", 1, None, "model.vocab_size=64"),
        submit(slurm, config, "crashing", 2, "raise SystemExit(1)"),
        submit(slurm, config, "unfit", 1, None, "--sbatch", "gpus-per-node=2"),
        submit(slurm, config, "spare", 1, LOSING, *SPARE),
        submit_array(slurm, config.parent),
        config.parent,
    )


def submit_array(slurm: Slurm, folder: Path) -> str:
    """Submit three preprocessing tasks over two JSON keys and a job that merges them; return its number."""
    source = folder / "text.jsonl"
    rows = ({"text": f"document {i}\n" * (i % 7 + 1), "title": str(i)} for i in range(300))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = ["--input", str(source), "--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]
    typed += ["--piece-mb", "0.002", "--json-keys", "text", "title"]
    assert preprocess_data.main([*typed, "--output-prefix", str(folder / "single")]) == 0
    script = ["bash", "scripts/slurm/preprocess.sbatch", "3", str(folder / "array"), *typed]
    return slurm.run(*script, SBATCH_OUTPUT=f"{folder}/array-%a.log", PYTHON=sys.executable).split()[-1]


def test_a_requeued_run_ends_with_the_numbers_of_an_uninterrupted_one(
    slurm: Slurm, config: Path, jobs: Jobs, pool: Pool
) -> None:
    """Once the run trains, its limit is lowered to one to two minutes: SLURM checks twice a minute, and warns it."""
    folder, whole = config.parent / "limited", config.parent / "whole"
    slurm.until(lambda: num_steps(folder) > 1, lambda: said(config, "limited"))
    slurm.run("scontrol", "update", f"JobId={jobs.limited}", f"TimeLimit={slurm.elapsed_min(jobs.limited) + 2}")
    assert pool.run(run_as_rank, 4, config, [[*in_run(str(whole)), *LAYOUT]]) == [[ExitCode.DONE]] * 4
    slurm.until(lambda: slurm.job(jobs.limited).num_requeues > 0, lambda: said(config, "limited"))
    slurm.run("scontrol", "update", f"JobId={jobs.limited}", "TimeLimit=10")
    assert slurm.wait(jobs.limited) == Job("COMPLETED", ExitCode.DONE, 1), said(config, "limited")
    assert "> requeued: the time limit is near" in said(config, "limited")
    begun = [json.loads(line)["iteration"] for line in (folder / "slurm.jsonl").read_text().splitlines()]
    assert begun[0] == 0 < begun[1] < NUM_ITERS and len(begun) == 2, "it was stopped on its way"
    assert steps(folder) == steps(whole) and len(steps(whole)) == NUM_ITERS
    got, wanted = stored(folder, NUM_ITERS), stored(whole, NUM_ITERS)
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == [] and got.keys() == wanted.keys()


def num_steps(folder: Path) -> int:
    """Return the number of steps that a run has logged."""
    return len(steps(folder)) if (folder / "metrics.jsonl").exists() else 0


def test_an_invalid_configuration_is_not_requeued(slurm: Slurm, config: Path, jobs: Jobs) -> None:
    """The error is one that only the ranks can find."""
    assert slurm.wait(jobs.wrong) == Job("FAILED", ExitCode.USER_ERROR, 0), said(config, "wrong")
    assert re.search(
        "model.vocab_size=64.*\n(.*\n)*> not requeued: the configuration or its files are wrong", said(config, "wrong")
    )
    assert not list((config.parent / "wrong").glob("iter_*"))


def test_two_launches_without_progress_end_the_job(slurm: Slurm, config: Path, jobs: Jobs) -> None:
    assert slurm.wait(jobs.crashing) == Job("FAILED", ExitCode.CRASH, 1), said(config, "crashing")
    verdicts = re.findall("> (.*requeued: .*)", said(config, "crashing"))
    assert [line.partition(":")[0] for line in verdicts] == ["requeued", "not requeued"]


def test_a_node_without_its_gpus_is_named(slurm: Slurm, config: Path, jobs: Jobs) -> None:
    """No rank starts on that node."""
    assert slurm.wait(jobs.unfit) == Job("FAILED", ExitCode.CRASH, 1), said(config, "unfit")
    assert re.findall("node (.*): torch sees 0 of the 2 GPUs", said(config, "unfit")) == ["127.0.0.1"] * 2
    assert "importing torch" not in said(config, "unfit")


def test_a_requeue_leaves_out_the_node_of_a_lost_rank(slurm: Slurm, config: Path, jobs: Jobs, pool: Pool) -> None:
    """Two ranks on one node, and a spare node: the second launch is on the other node, and ends with the same bits."""
    assert slurm.wait(jobs.spare) == Job("COMPLETED", ExitCode.DONE, 1), said(config, "spare")
    folder, whole = config.parent / "spare", config.parent / "not spare"
    chosen = [json.loads(line) for line in (folder / "slurm_nodes.jsonl").read_text().splitlines()]
    assert [each["nodes"] for each in chosen] == [["127.0.0.1"], ["127.0.0.2"]]
    assert chosen[1]["left_out"] == {"127.0.0.1": "rank 1 of launch 1 was at fault"}
    assert "> node 127.0.0.1 is left out: rank 1 of launch 1 was at fault" in said(config, "spare")
    pool.run(run_as_rank, 2, config, [[*in_run(str(whole)), *SPARE[:2]]])
    assert steps(folder)[-2:] == steps(whole)[-2:]


def test_slurm_accepts_the_committed_job(slurm: Slurm) -> None:
    """SLURM accepts the job, which requests as many GPUs as the node has."""
    sizes = ["--ntasks-per-node=2", "--gpus-per-node=2"]  # and 16 of its 32 CPUs
    slurm.run("sbatch", "--test-only", *sizes, "scripts/slurm/pretrain.sbatch", "--config", "configs/quickstart.yaml")


def test_an_array_writes_the_bytes_of_one_process(slurm: Slurm, jobs: Jobs) -> None:
    logs = "".join(path.read_text() for path in jobs.corpora.glob("array-*.log"))
    assert slurm.wait(jobs.merging) == Job("COMPLETED", 0, 0), logs
    for suffix in (f"_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx", "manifest.json")):
        assert (jobs.corpora / f"array{suffix}").read_bytes() == (jobs.corpora / f"single{suffix}").read_bytes()


def test_an_allocation_in_which_srun_starts_ranks(slurm: Slurm) -> None:
    program = (
        "from megatron3d.runtime import process; p = process.launcher_env(); "
        "print(p.rank, p.world_size, p.local_rank, p.address)"
    )
    typed = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "srun", sys.executable, "-c", program]
    lines = slurm.run("bash", "scripts/slurm/interactive.sh", *typed).splitlines()
    assert sorted(lines) == [f"{rank} 4 {rank % 2} 127.0.0.1" for rank in range(4)]
