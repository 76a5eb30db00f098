"""Fact: a run learns from real text, writes the documented files, and its lower precisions stay near float64."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.config.read import read_config
from megatron3d.config.resolve import resolve
from megatron3d.metrics.journal import read_journal
from tests.support.tiny_run import ROOT, evaluations, in_run, launch_forked, run, steps, write_config

NUM_ITERS = 60
STEP_KEYS = {
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "elapsed_ms",
    "remaining_s",
    "tokens_per_s",
    "tokens_per_s_per_rank",
    "tflops_per_s_per_rank",
    "mfu",
    "hfu",
    "peak_memory_bytes",
    "timers",
    "memory",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("pretrain"))


@pytest.fixture(scope="module")
def overrides(config: Path) -> list[str]:
    """Return overrides for evaluations, checkpoints and every metrics sink."""
    return [
        f"train.train_iters={NUM_ITERS}",
        "train.eval_interval=20",
        "train.eval_iters=2",
        "checkpoint.save_interval=25",
        f"logging.tensorboard_dir={config.parent / 'tensorboard'}",
        "logging.wandb_project=tiny",
        "logging.wandb_mode=offline",
    ]


@pytest.fixture(scope="module")
def trained(config: Path, overrides: list[str]) -> Path:
    """Return the folder of a finished run."""
    outcome = run(config, *overrides)
    assert outcome.code == 0, outcome.err
    return config.parent / "run"


def test_the_loss_falls(trained: Path) -> None:
    losses = [loss for _, loss, _ in steps(trained)]
    first, last = losses[0], sum(losses[-5:]) / 5
    assert abs(first - math.log(257)) < 0.1, "an untrained model knows nothing"
    assert last < first - 2, f"loss fell from {first} to {last} only"
    validation = [loss for _, loss in evaluations(trained)]
    assert validation == sorted(validation, reverse=True) and validation[-1] < first - 2


def test_the_folder_holds_the_documented_files(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    checkpoints = {"iter_0000025", "iter_0000050", "iter_0000060"}
    files = {"config.yaml", "metrics.jsonl", "latest_checkpointed_iteration.txt", ".lock"}
    assert names == {*files, "wandb", *checkpoints}
    assert (trained / "latest_checkpointed_iteration.txt").read_text() == "60\n"


def test_a_line_per_step_and_per_evaluation(trained: Path) -> None:
    rows = read_journal(trained / "metrics.jsonl")
    others = ({"iteration", "validation_loss"}, {"iteration", "first_step"}, {"iteration", "start"})
    assert all(row.keys() >= STEP_KEYS or row.keys() in others for row in rows) and "start" in rows[0]
    assert [iteration for iteration, *_ in steps(trained)] == list(range(1, NUM_ITERS + 1))
    assert [iteration for iteration, _ in evaluations(trained)] == [20, 40, 60]
    last = rows[-2]
    assert (last["consumed_samples"], last["consumed_tokens"]) == (NUM_ITERS * 16, NUM_ITERS * 16 * 16)
    assert last["tokens_per_s"] == pytest.approx(256_000 / last["elapsed_ms"])
    seconds = [(row["remaining_s"], row["elapsed_ms"] / 1e3) for row in rows if "lm_loss" in row]
    assert [left for left, _ in seconds] == [pytest.approx((60 - n) * s) for n, (_, s) in enumerate(seconds, 1)]


def test_the_last_iteration_is_logged(config: Path) -> None:
    """A run that is shorter than the interval, or ends between two lines, also says where it has come to."""
    folder = str(config.parent / "between")
    asked = [*in_run(folder), "logging.log_interval=4"]
    assert run(config, *asked, "train.train_iters=6").code == 0
    assert run(config, *asked, "train.train_iters=9", "train.exit_interval=7").code == 3
    assert [iteration for iteration, *_ in steps(Path(folder))] == [4, 6, 7]
    last = read_journal(Path(folder) / "metrics.jsonl")[-1]
    assert last == {"iteration": 7, "stop": "train.exit_interval"}, "a run that is complete did not stop"


def test_the_written_configuration_is_the_configuration(config: Path, overrides: list[str], trained: Path) -> None:
    assert read_config(trained / "config.yaml").config == resolve(config, overrides, 1).config


def test_every_sink_receives_the_metrics(config: Path, trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.parent / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm_loss")] == [
        (iteration, pytest.approx(loss)) for iteration, loss, _ in steps(trained)
    ]
    assert [event.step for event in events.Scalars("validation_loss")] == [20, 40, 60]
    (offline,) = (trained / "wandb").glob("offline-run-*/run-*.wandb")
    assert offline.stat().st_size > 1000


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (
            ["train.train_iters=2"],
            "complete at iteration 2 of 2, saved in RUN; the same command with train.train_iters=4;",
        ),
        (["train.exit_interval=1"], "stopped at iteration 1 of 8, saved in RUN; the same command;"),
        (["train.exit_interval=1", "checkpoint.load=null"], "the same command with checkpoint.load=RUN;"),
        (["train.train_iters=3", *in_run("null")], "nothing was saved, since there is no checkpoint.save;"),
    ],
)
def test_a_run_says_how_to_go_on(config: Path, tmp_path: Path, asked: list[str], wanted: str) -> None:
    """The commands that it names work."""
    folder = str(tmp_path / "my run")
    out = run(config, *in_run(folder), *asked).out
    said = [line.partition("> ")[2].replace(f"'{folder}'", "RUN").replace(folder, "RUN") for line in out.splitlines()]
    assert wanted in "; ".join([*said, ""]).replace("to go on: ", ""), out
    commands = [line.partition(": ")[2] for line in out.splitlines() if line.startswith(("> to sample", "> to plot"))]
    assert len(commands) == 2 * ("saved in" in out)
    for command in commands if "train.train_iters=2" in asked else ():
        subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_the_startup_report_and_the_console_lines(config: Path) -> None:
    out = run(config, *in_run(str(config.parent / "report")), "train.train_iters=2").out
    for part in (
        "> world_size 1 = TP 1 x PP 1 x DP 1",
        "> global_batch_size 16 = micro_batch_size 4 x data parallel 1 x microbatches 4",
        "> model: 2 layers, hidden 32, 8 heads, ffn 128, length 16, vocabulary 257 padded to 384",
        "> parameters: 34,208 in the model",
        "> MFU is relative to 0.01 TFLOP/s per device (logging.peak_tflops)",
        "iteration        1/       2 | consumed samples:           16 | elapsed time per iteration (ms): ",
    ):
        assert part in out, out


def test_a_run_without_a_folder_writes_nothing(config: Path) -> None:
    before = sorted(config.parent.iterdir())
    outcome = run(config, *in_run("null"), "train.train_iters=2")
    assert (outcome.code, sorted(config.parent.iterdir())) == (0, before)
    assert "iteration        2/       2" in outcome.out


@pytest.mark.parametrize(("precision", "band"), [("bf16", 0.01), ("fp32", 1e-5)])
def test_every_precision_is_close_to_float64(config: Path, precision: str, band: float) -> None:
    """Each of 24 losses is near that of float64, relative to it."""
    found: dict[str, list[float]] = {}
    for name in (precision, "fp64"):
        folder = config.parent / f"{precision} and {name}"
        settings = [f"train.precision={name}", "train.train_iters=24", "optimizer.lr=3e-3"]
        assert run(config, *in_run(str(folder)), *settings).code == 0
        found[name] = [loss for _, loss, _ in steps(folder)]
    worst = max(abs(low / high - 1) for low, high in zip(found[precision], found["fp64"], strict=True))
    assert 0 < worst < band, f"{precision} departs from float64 by {worst:.1e}"
    assert found["fp64"][-1] < found["fp64"][0] - 1


IMPORTING = """
import json, sys
from megatron3d.runtime import process
import pretrain_gpt
def preload(*given):
    import torch
    def refuse(*_):
        raise AssertionError("starts CUDA before the fork")
    kept = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available = torch.cuda.device_count = refuse
    pretrain_gpt.preload(*given)
    torch.cuda.is_available, torch.cuda.device_count = kept
if __name__ == "__main__":
    before = set(sys.modules)
    code = process.run_program(pretrain_gpt.main)
    print(json.dumps(sorted(set(sys.modules) - before)))
    sys.exit(code)
"""


def test_ranks_of_one_machine_share_all_imports(config: Path, tmp_path: Path) -> None:
    """Bugs that this finds: each rank imports a large module itself, or what is imported once starts CUDA."""
    (tmp_path / "importing.py").write_text(IMPORTING)
    layout = ["parallel.pipeline_model_parallel_size=2", "checkpoint.async_save=true", "train.eval_interval=2"]
    typed = ["--config", str(config), *in_run(f"{tmp_path}/run"), *layout]
    child = launch_forked(str(tmp_path / "importing.py"), 2, *typed)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    assert len(found) == 2
    large = ("megatron3d", "torch", "numpy", "sympy", "triton", "pydantic", "yaml", "safetensors")
    assert [name for names in found for name in names if name.partition(".")[0] in large] == []


def test_check_of_the_quickstart_without_torch(config: Path) -> None:
    """The README's --check works without torch, on an existing corpus."""
    typed = ["--config", "configs/quickstart.yaml", "--check", "--world-size", "2"]
    typed += [f"data.data_path={config.parent / 'corpus'}", "data.tokenizer_type=ByteTokenizer"]
    typed += ["data.tokenizer_model=null", f"checkpoint.save={config.parent / 'absent'}", "checkpoint.load=null"]
    program = (
        f"import runpy, sys\nsys.argv[1:] = {typed}\ntry:\n    runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "world_size 2 = TP 1 x PP 1 x DP 2" in done.stdout.splitlines()
    assert not (config.parent / "absent").exists()


def test_keys_without_effect_change_no_bit(config: Path, tmp_path: Path) -> None:
    """A file whose features are turned off to look for an error trains as one without their keys, with a warning."""
    keys = ["parallel.tp_comm_overlap=true", "parallel.tp_keep_gathered_weights=true", "train.loss_scale=64"]
    keys += ["train.tp_grad_reduce_in_bf16=true", "model.moe_router_topk=2", "model.moe_aux_loss_coeff=0.1"]
    keys += ["parallel.moe_token_dispatcher_type=alltoall", "logging.record_memory_history=true", "data.goldfish_h=4"]
    keys += ["train.recompute_modules=[mlp_act]", "optimizer.lr_warmup_iters=9"]
    for name, more in (("without", ["optimizer.lr_warmup_iters=9"]), ("with", keys)):
        outcome = run(config, *in_run(f"{tmp_path}/{name}"), "train.train_iters=3", *more)
        assert outcome.code == 0 and ("no effect in this run: " in outcome.out) == (name == "with"), outcome
        assert (
            "> WARNING: optimizer.lr_warmup_iters=9 (command line): the run ends at train.train_iters=3" in outcome.out
        )
    assert steps(tmp_path / "with") == steps(tmp_path / "without")
