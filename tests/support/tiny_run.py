"""A tiny run on real text: a corpus from the standard library, a configuration, and pretrain_gpt.py in this process."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

import pretrain_gpt
from megatron3d.checkpoint.index import read_index
from megatron3d.config.resolve import resolve
from megatron3d.data.token_files.indexed import token_dtype
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.runtime import process
from megatron3d.runtime.program import StartupPhases, StopSignal
from megatron3d.train.build import build_run
from megatron3d.train.loop import train
from tests.support.processes import start

ROOT = Path(__file__).parents[2]
TINY: Mapping[str, Mapping[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "seq_length": 16},
    "train": {"global_batch_size": 16, "micro_batch_size": 4, "train_iters": 8},
    "optimizer": {"lr": 1e-2, "lr_warmup_iters": 2},
    "data": {"tokenizer_type": "ByteTokenizer", "split": "90,10,0"},
    "logging": {"log_interval": 1, "peak_tflops": 0.01, "straggler_factor": None},  # the machine may be busy
}


def write_corpus(prefix: Path, text: str | None = None, tokenizer: Tokenizer | None = None) -> Path:
    """Write a token file with one document per paragraph of a text, by default the source of a module."""
    tokenizer = tokenizer or ByteTokenizer(None)
    documents = (text or inspect.getsource(textwrap)).split("\n\n")
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for document in documents:
            ids = tokenizer.encode(document) + ([] if tokenizer.eod is None else [tokenizer.eod])
            writer.add(np.array(ids, token_dtype(tokenizer.vocab_size)), np.array([len(ids)], np.int32))
        writer.finish(tokenizer)
    return prefix


def write_config(folder: Path) -> Path:
    """Write a corpus and a tiny configuration of a run that saves to, and resumes from, `folder/run`."""
    places = {
        "data": {**TINY["data"], "data_path": str(write_corpus(folder / "corpus"))},
        "checkpoint": {"save": str(folder / "run"), "load": str(folder / "run")},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({name: dict(keys) for name, keys in {**TINY, **places}.items()}))
    return path


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a run."""

    code: int
    out: str
    err: str


def run(config: Path, *overrides: str) -> Outcome:
    """Run `pretrain_gpt.py --config CONFIG OVERRIDES` on one rank, in this process."""
    out, err = io.StringIO(), io.StringIO()
    alone = {"OMP_NUM_THREADS": "1"}
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", "--config", str(config), *overrides]),
        mock.patch.dict(os.environ, alone),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = process.run_program(pretrain_gpt.main)
    return Outcome(code, out.getvalue(), err.getvalue())


def run_as_rank(rank: int, world_size: int, config: Path, overrides: list[list[str]]) -> list[int]:
    """Run several configurations in turn as a rank of the pool; return their exit codes."""
    return [_train(process.Runtime(rank, world_size, rank, torch.device("cpu")), config, each) for each in overrides]


def _train(here: process.Runtime, config: Path, overrides: list[str]) -> int:
    built = build_run(resolve(config, overrides, here.world_size), here, StartupPhases(printing=False))
    try:
        return train(built, StopSignal())
    finally:
        built.close()


def in_run(name: str) -> list[str]:
    """Return the overrides that give a run its own folder."""
    return [f"checkpoint.save={name}", f"checkpoint.load={name}"]


Step = tuple[int, float, float]


def steps(folder: Path) -> list[Step]:
    """Return iteration, loss and gradient norm of every logged step."""
    rows = [row for row in read_journal(folder / "metrics.jsonl") if "lm_loss" in row]
    return [(row["iteration"], row["lm_loss"], row["grad_norm"]) for row in rows]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return iteration and validation loss of every evaluation."""
    rows = [row for row in read_journal(folder / "metrics.jsonl") if "validation_loss" in row]
    return [(row["iteration"], row["validation_loss"]) for row in rows]


def stored(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Return every logical tensor of a checkpoint, assembled from its boxes."""
    checkpoint = folder / f"iter_{iteration:07d}"
    files = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    whole = {}
    for name, tensor in read_index(checkpoint).tensors.items():
        parts = [(box.box, files[box.file][box.key]) for box in tensor.boxes]
        whole[name] = torch.full(tensor.shape, torch.nan, dtype=parts[0][1].dtype)
        for box, part in parts:
            whole[name][tuple(slice(low, high) for low, high in box)] = part
    return whole


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every file below a folder with its bytes, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


Words = tuple[str, ...]


def refuse(config: Path, overrides: list[str], *problems: Words) -> None:
    """Run, and require one line with the given words for each problem, and no other effect."""
    before = tree(config.parent)
    outcome = run(config, *(text.format(here=config.parent) for text in overrides))
    assert tree(config.parent) == before
    assert_refused(outcome, config.parent, *problems)


def assert_refused(outcome: Outcome, here: Path, *problems: Words) -> None:
    lines = outcome.err.splitlines()
    assert outcome.code == ExitCode.USER_ERROR, outcome
    assert "Traceback" not in outcome.err + outcome.out and "iteration " not in outcome.out
    assert len(lines) == len(problems), outcome.err
    for line, words in zip(lines, problems, strict=True):
        missing = [word for word in words if word.format(here=here) not in line]
        assert not missing, f"{missing} not in: {line}"


def cut(path: Path, num_bytes: int) -> None:
    """Truncate a file by some bytes."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def launch_ranks(program: Sequence[str], num_ranks: int) -> list[subprocess.Popen[str]]:
    """Start a program as several CPU ranks, without a launcher that terminates the others when one dies."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return [
        start(
            [sys.executable, *program],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]


def launch(program: Sequence[str], num_ranks: int = 1) -> subprocess.Popen[str]:
    """Start a program on the CPU in new processes, bare or under torchrun, as one session that can be signalled."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return _session([sys.executable, *(launcher if num_ranks > 1 else []), *program])


# What scripts/launch_local.sh says on standard error.
LAUNCHED = r"> importing torch\n> starting [0-9]+ ranks? after [0-9]+\.[0-9] s\n"


def launch_forked(program: str, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a program as ranks of the launcher of scripts/launch_local.sh."""
    return _session([sys.executable, "-m", "megatron3d.runtime.local_ranks", program, str(num_ranks), *arguments])


def launch_local(num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start pretrain_gpt.py through scripts/launch_local.sh."""
    return _session(["bash", "scripts/launch_local.sh", str(num_ranks), *arguments])


def _session(command: Sequence[str]) -> subprocess.Popen[str]:
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return start(
        command,
        cwd=ROOT,
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
