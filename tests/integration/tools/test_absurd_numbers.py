"""Fact: every tool refuses numbers that are too large, not finite or not ASCII with exit code 2 and a short message."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

HUGE = "9" * 40
SIZES = ["--hidden-size", "64", "--seq-length", "64", "--micro-batch-size", "1"]
COMMANDS = [
    ["plot_schedule", "--schedule", "1f1b", "-p", "4", "-m", "10000000"],
    ["plot_schedule", "--schedule", "1f1b", "-p", "1000000", "-m", "1"],
    ["plot_schedule", "--schedule", "zb-v", "-p", "9999", "-m", "1"],
    ["plot_schedule", "--schedule", "1f1b", "-p", "²", "-m", "4"],
    ["plot_schedule", "--schedule", "zb-2p", "-p", "4", "-m", "4", "--costs", "F=1e-300,W=1e-300"],
    ["plot_schedule", "--schedule", "zb-2p", "-p", "4", "-m", "4", "--costs", "F=1e308,I=1e308"],
    ["plot_schedule", "--schedule", "file", "--input", "/dev/zero"],
    ["calibrate", "--seconds", "inf"],
    ["calibrate", "--seconds", "nan"],
    ["calibrate", "--seconds", "-1"],
    ["plan", "--cluster", "selene", "--world-size", "8", "--tokens", "nan"],
    ["plan", "--cluster", "selene", "--world-size", HUGE],
    ["plan", "--cluster", "selene", "--world-size", "8", "--vocab-size", "1000000000000"],
    ["verify_layout", "--config", "configs/quickstart.yaml", "--tolerance", "nan"],
    ["verify_layout", "--config", "configs/quickstart.yaml", "--world-size", HUGE],
    ["verify_layout", "--config", "configs/quickstart.yaml", "--steps", "0"],
    ["coord_check", "--config", "configs/quickstart.yaml", "--widths", "64", HUGE],
    ["coord_check", "--config", "configs/quickstart.yaml", "--steps", "0"],
    ["generate", "--load", "x", "--temperature", "nan"],
    ["generate", "--load", "x", "--temperature", "inf"],
    ["generate", "--load", "x", "--seed", "9" * 30],
    ["generate", "--load", "x", "--top-k", "²"],
    ["generate", "--load", "x", "--max-new-tokens", HUGE],
    ["evaluate", "--load", "x", "--samples", "0"],
    ["evaluate", "--load", "x", "--micro-batch-size", HUGE],
    ["lm_harness", "--load", "x", "--tasks", "a", "--batch-size", HUGE],
    ["preprocess_data", "--input", "setup.py", "--output-prefix", "/absent/x", "--shard", f"0/{HUGE}"],
    ["preprocess_data", "--input", "setup.py", "--output-prefix", "/absent/x", "--workers", "1000000000"],
    ["train_tokenizer", "--input", "setup.py", "--output-prefix", "/absent/x", "--vocab-size", HUGE],
    ["train_tokenizer", "--input", "setup.py", "--output-prefix", "/absent/x", "--max-mb", "nan"],
    ["make_corpus", "--output", "/absent/x", "--max-mb", "nan"],
    ["inspect_dataset", "x", "--documents", HUGE],
    ["show_traffic", *SIZES, "--world-size", HUGE],
    ["show_traffic", *SIZES, "--world-size", "999983"],
    ["show_traffic", *SIZES, "--world-size", "8", "--shape", "3d=²x2x2"],
    ["show_memory", *SIZES, "--num-attention-heads", HUGE, "--world-size", "1"],
    ["show_samples", "--config", "configs/quickstart.yaml", "--iterations", "²"],
    ["show_samples", "--config", "configs/quickstart.yaml", "--iterations", HUGE],
    ["draw_layouts", "--mode", "3d", "--shape", HUGE, "1", "1", "--output", "/absent/x.svg"],
    ["checkpoint", "verify", "x", "--workers", HUGE],
    ["convert_checkpoint", "to-hf", "--input", "x", "--output", "y", "--seq-length", HUGE],
    ["convert_checkpoint", "to-hf", "--input", "x", "--output", "y", "--max-shard-size", f"{HUGE}GB"],
    ["plot_run", "x", "--refresh", HUGE],
    ["make_slurm", "--config", "configs/gpt2-124m.yaml", "--cluster", "selene", "--nodes", HUGE],
    ["make_slurm", "--config", "configs/gpt2-124m.yaml", "--cluster", "selene", "--nodes", "1", "--time", HUGE],
    ["make_slurm", "--config", "configs/gpt2-124m.yaml", "--cluster", "x" * 300, "--nodes", "1"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(command)[:60] for command in COMMANDS])
def test_an_absurd_number_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    tool = importlib.import_module(f"tools.{command[0]}")
    begin = time.process_time()
    try:
        code = tool.main(command[1:])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2
    assert 0 < len(said.err) < 4000 and "Traceback" not in said.err
    assert time.process_time() - begin < 5
