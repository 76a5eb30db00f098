"""Under a real SLURM a run that meets its time limit is queued again and ends with the numbers of one that never
stopped; a job that cannot get further is not queued again; token files of an array are those of one process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron3d import runtime
from tests.end_to_end import ROOT, in_run, run_as_rank, steps, stored, write_config
from tests.pool import Pool
from tests.slurm import Job, Slurm, missing
from tools import make_slurm, preprocess_data

NUM_ITERS = 60
CLUSTER = """
name: two nodes of two processes
accelerator: cpu
cores: 2
levels: [{name: node, ranks: 2, gb_s: 1, latency_us: 1}, {name: network, ranks: 4, gb_s: 1, latency_us: 1}]
source: this test
"""
LAYOUT = ["parallel.tensor_model_parallel_size=2", f"train.train_iters={NUM_ITERS}", "model.hidden_dropout=0.1"]
# A second for each step of a start that begins at the beginning, so that on any machine the limit comes before the end.
SLOW = """
import sys, time
sys.path.insert(0, {root!r})
import pretrain_gpt
from megatron3d import runtime
from megatron3d.train import loop

train, step = loop.train, loop.train_step
def slow_train(run, stop):
    pause_s = 0.0 if run.state.iteration else 1.0
    loop.train_step = lambda *args: (time.sleep(pause_s), step(*args))[1]
    return train(run, stop)
loop.train = slow_train
sys.exit(runtime.run_program(pretrain_gpt.main))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("jobs"))


def submit(slurm: Slurm, config: Path, name: str, nodes: int, program: str | None, *overrides: str) -> str:
    """Have a job written, and submit it, perhaps with another program in place of pretrain_gpt.py; its number."""
    here = config.parent
    (here / "two.yaml").write_text(CLUSTER)
    job = here / f"{name}.sbatch"
    typed = ["--config", str(config), "--cluster", str(here / "two.yaml"), "--nodes", str(nodes), "--time", "1"]
    typed += ["--python", sys.executable, "--warn", "10", "--sbatch", f"output={here}/{name}.log", "--output", str(job)]
    assert make_slurm.main([*typed, *in_run(str(here / name)), *overrides]) == 0
    if program is not None:
        (here / f"{name}.py").write_text(program.format(root=str(ROOT)))
        job.write_text(job.read_text().replace(" pretrain_gpt.py ", f" {here}/{name}.py "))
    return slurm.run("sbatch", "--parsable", str(job)).strip()


def said(config: Path, name: str) -> str:
    """What a job wrote."""
    return (config.parent / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def limited(slurm: Slurm, config: Path) -> str:
    """A job that meets its limit of a minute, submitted with the first test since it takes longest."""
    return submit(slurm, config, "limited", 2, SLOW, *LAYOUT)


def test_an_array_writes_the_bytes_of_one_process(slurm: Slurm, limited: str, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    rows = ({"text": f"document {i}\n" * (i % 7 + 1), "title": str(i)} for i in range(300))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = ["--input", str(source), "--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]
    typed += ["--piece-mb", "0.002", "--json-keys", "text", "title"]
    script = ["bash", "scripts/slurm/preprocess.sbatch", "3", str(tmp_path / "array"), *typed]
    merge = slurm.run(*script, SBATCH_OUTPUT=f"{tmp_path}/%A-%a.log", PYTHON=sys.executable).split()[-1]
    assert preprocess_data.main([*typed, "--output-prefix", str(tmp_path / "single")]) == 0
    job = slurm.wait(merge)
    assert (job.state, job.code) == ("COMPLETED", 0), [path.read_text() for path in tmp_path.glob("*.log")]
    for suffix in (f"_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx", "manifest.json")):
        assert (tmp_path / f"array{suffix}").read_bytes() == (tmp_path / f"single{suffix}").read_bytes()


def test_a_wrong_configuration_is_not_queued_again(slurm: Slurm, config: Path) -> None:
    """One that the ranks find wrong, in the corpus."""
    number = submit(slurm, config, "wrong", 1, None, "model.vocab_size=64")
    assert slurm.wait(number) == Job("FAILED", runtime.EXIT_USER_ERROR, 0), said(config, "wrong")
    assert re.search("model.vocab_size=64.*\n(.*\n)*> not queued again: what was given is wrong", said(config, "wrong"))
    assert not list((config.parent / "wrong").glob("iter_*"))


def test_two_starts_without_progress_are_enough(slurm: Slurm, config: Path) -> None:
    number = submit(slurm, config, "crashing", 2, "raise SystemExit(1)")
    assert slurm.wait(number) == Job("FAILED", runtime.EXIT_CRASH, 1), said(config, "crashing")
    verdicts = re.findall("> (.*queued again: .*)", said(config, "crashing"))
    assert [line.partition(":")[0] for line in verdicts] == ["queued again", "not queued again"]


def test_an_allocation_in_which_srun_starts_ranks(slurm: Slurm) -> None:
    program = (
        "from megatron3d import runtime as r; p = r.placement(); print(p.rank, p.world_size, p.local_rank, p.address)"
    )
    typed = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "srun", sys.executable, "-c", program]
    lines = slurm.run("bash", "scripts/slurm/interactive.sh", *typed).splitlines()
    assert sorted(lines) == [f"{rank} 4 {rank % 2} 127.0.0.1" for rank in range(4)]


def test_a_run_that_meets_its_limit_ends_with_the_numbers_of_one_that_never_stopped(
    slurm: Slurm, config: Path, limited: str, pool: Pool
) -> None:
    overrides = [*in_run(str(config.parent / "whole")), *LAYOUT]
    assert pool.run(run_as_rank, 4, config, [overrides]) == [[runtime.EXIT_DONE]] * 4
    job = slurm.wait(limited)
    assert (job.state, job.code) == ("COMPLETED", 0) and job.num_requeues >= 1, said(config, "limited")
    folder, whole = config.parent / "limited", config.parent / "whole"
    begun = [json.loads(line)["iteration"] for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert begun[0] == 0 < begun[-1] < NUM_ITERS, "it was stopped on its way"
    assert "> queued again: the time limit is near" in said(config, "limited")
    assert steps(folder) == steps(whole) and len(steps(whole)) == NUM_ITERS
    got, wanted = stored(folder, NUM_ITERS), stored(whole, NUM_ITERS)
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == [] and got.keys() == wanted.keys()
