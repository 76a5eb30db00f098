"""Files that a person writes or a run leaves: configuration, cluster, schedule, metrics, launches."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from markupsafe import Markup

from megatron3d.config.report import batch_arithmetic, render
from megatron3d.config.resolve import parameter_line, resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.time.hardware import FOLDER, load_accelerator, load_cluster
from megatron3d.forecast.time.step import make_machine, predict_time
from megatron3d.launch.requeue import FILE_NAME, Launch, start_iterations
from megatron3d.launch.script import JobSettings, fill_template, options
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.schedules import build_schedule, load_schedule
from megatron3d.pipeline.simulate import simulate
from megatron3d.pipeline.validate import write_schedule
from megatron3d.runtime.launcher_env import SlurmJob
from megatron3d.viz.curves import read_run
from megatron3d.viz.report import is_finished, report
from tests.fuzz.mutators import BOMB
from tests.fuzz.runner import Target
from tests.support.valid_config import with_changes

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/integration/data/stored_run/four_ranks/run"
NUM_RANKS = 8
CONFIG = """\
# A run of eight ranks.
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 16, seq_length: 8, kv_channels: 4}
parallel:
  pipeline_model_parallel_size: 2
  tensor_model_parallel_size: 2
train: &train
  micro_batch_size: 4
  global_batch_size: 16
  train_iters: 10
optimizer:
  lr: 3.0e-4
  adam_beta2: 0.95
data:
  tokenizer_type: ByteTokenizer
  data_path: [0.7, "data/web text", 0.3, data/books]
  split: 90,10,0
checkpoint: {save: run, load: run}
logging:
  log_interval: 1
"""
OVERRIDES = "train.train_iters=100\noptimizer.lr=1e-3\nparallel.pipeline_schedule=1f1b\ncheckpoint.save=runs/a b\n"
YAML_WORDS = (
    *(
        BOMB,
        b"&a ",
        b"*a",
        b"*train",
        b"<<: ",
        b"!!bool ",
        b"!!int ''",
        b"!!float x",
        b"!!timestamp 2001-01-01",
        b"!!set ",
    ),
    *(
        b"!!python/object/apply:os.system [ls]",
        b"? ",
        b"- ",
        b"|\n",
        b">-\n",
        b"---\n",
        b"...\n",
        b"%YAML 9.9\n",
        b"#",
        b"\t",
    ),
    *(
        b"model:",
        b"train:",
        b"optimizer:",
        b"optimizer.lr: 3",
        b"parallel.tensor_parallel_shape=",
        b"[2,2,2]",
        b"train.seed=",
    ),
)


def write_config(folder: Path) -> None:
    """Write a configuration, and overrides in lines."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "overrides").write_text(OVERRIDES)


def read_config(folder: Path) -> object:
    """Do what `pretrain_gpt.py --check` does."""
    text = (folder / "overrides").read_bytes().decode(errors="surrogateescape")
    overrides = [line for line in text.replace("\0", "").split("\n") if line]
    resolved = resolve(folder / "config.yaml", overrides, NUM_RANKS, elsewhere=True)
    spec = RunSpec(resolved.config, NUM_RANKS)
    return render(resolved), batch_arithmetic(spec), parameter_line(resolved.config)


CLUSTER = """\
name: Example
accelerator: a100
levels:
  - {name: socket, ranks: 2, gb_s: 100, is_pairwise: true, latency_us: 1}
  - {name: node, ranks: 8, gb_s: 50.5, latency_us: 3}
  - {name: network, ranks: 4480, gb_s: 20, latency_us: 10}
source: nowhere
call_us: 3
cores: 4
call_busy: 0.5
slurm:
  options: {partition: gpu, exclusive: null, mem: 0}
  setup: [module load cuda, export A=1]
"""


def write_cluster(folder: Path) -> None:
    """Write a cluster, and copy an accelerator."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    shutil.copy(FOLDER / "a100.yaml", folder / "accelerator.yaml")


def read_cluster(folder: Path) -> object:
    """Load both, and use them: the predicted time of a step, and a job script."""
    cluster = load_cluster(str(folder / "cluster.yaml"))
    accelerator = load_accelerator("accelerator", folder)
    spec = RunSpec(
        with_changes({"parallel": {"tensor_model_parallel_size": 2}, "train": {"global_batch_size": 32}}),
        NUM_RANKS,
        1000,
    )
    seconds = predict_time(spec, make_machine(cluster, accelerator, "fp32", NUM_RANKS)).step_s
    assert 0 < seconds < math.inf, f"a step of {seconds} s"
    settings = JobSettings(dict(options(1, cluster.node_ranks)) | dict(cluster.slurm.options), cluster.slurm.setup)
    return fill_template((ROOT / "scripts/slurm/pretrain.sbatch").read_text(), settings)


def write_csv(folder: Path) -> None:
    """Write a schedule of three ranks."""
    write_schedule(build_schedule("zb-h1", 3, 5), folder / "schedule.csv")


def read_csv(folder: Path) -> object:
    """Load a schedule, and use it: the lists that the ranks run, and their times."""
    schedule = load_schedule(folder / "schedule.csv")
    lower(schedule)
    return simulate(schedule).makespan


def copy_run(folder: Path) -> None:
    """Copy the metrics and the configuration of a run that was stopped."""
    for name in ("metrics.jsonl", "config.yaml"):
        shutil.copy(STORED / name, folder / name)


def read_metrics(folder: Path) -> object:
    """Make the page of a run; its curves only of one input in fifty, since they take a second."""
    rows = read_run(folder)
    is_finished(rows)
    if zlib.crc32((folder / "metrics.jsonl").read_bytes()) % 50 == 0:
        return len(report(folder))
    with mock.patch("megatron3d.viz.report.figure_svg", lambda _: Markup()), mock.patch("megatron3d.viz.report.draw"):
        return len(report(folder))


JOB = SlurmJob(7, 2, 8, "node1", "node[1-2]")


def write_launches(folder: Path) -> None:
    """Write the launches of a job that was requeued."""
    launches = [Launch(JOB.job_id, number, JOB.nodes, 100 * number, "2026-01-01T00:00:00+00:00") for number in range(3)]
    (folder / FILE_NAME).write_text("".join(json.dumps(asdict(launch)) + "\n" for launch in launches))


def read_launches(folder: Path) -> object:
    """Read the launches as the decision to requeue does."""
    return start_iterations(folder, JOB)


TARGETS = (
    Target("config", write_config, read_config, YAML_WORDS),
    Target("cluster", write_cluster, read_cluster, YAML_WORDS),
    Target(
        "schedule",
        write_csv,
        read_csv,
        (b"0F0", b"1B2", b"2W4", b"0REDUCE_GRAD", b"1SEND_F0", b",", b"\n", b"\r", b'"0F0,"'),
    ),
    Target(
        "metrics",
        copy_run,
        read_metrics,
        (b'"start":', b'"lm_loss":', b'"iteration":', b'"timers":', b"}\n{"),
        ("metrics.jsonl",),
    ),
    Target("launches", write_launches, read_launches, (b'"job":', b'"iteration":', b"}\n{")),
)
