"""Fact: the loss on a corpus is the mean over its tokens, each predicted once, in every layout, as in training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import ExitCode
from megatron3d.inference.load import read_run, resolve, restore
from megatron3d.parallel.modes import MODES
from megatron3d.runtime import process
from tests.support.pool import Pool
from tests.support.tiny_run import evaluations, run, write_config, write_corpus
from tools import evaluate

FP64 = "train.precision=fp64"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that evaluated 2 x 16 sequences at its end."""
    here = tmp_path_factory.mktemp("evaluate")
    typed = [FP64, "train.eval_interval=8", "train.eval_iters=2"]
    assert run(write_config(here), *typed).code == 0
    return here / "run"


def result(capsys: pytest.CaptureFixture[str], *typed: str) -> dict[str, float]:
    assert evaluate.main([*typed, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def plain_loss(folder: Path) -> tuple[float, int]:
    """Return the summed loss over all windows from one process's logits, and the number of labels."""
    config = read_run(resolve(folder), [FP64], 1)
    here = process.Runtime(0, 1, 0, torch.device("cpu"))
    executor = restore(config, ByteTokenizer(None), resolve(folder), here)
    data = IndexedDataset(str(config.data.data_path))
    tokens, length = torch.from_numpy(data.tokens(0, data.num_tokens).astype("int64")), config.model.seq_length
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        with torch.no_grad():
            logits = next(iter(executor._forward([executor.model.begin_sampling(window[None, :-1])]).values()))
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    return total, len(tokens) - 1


def test_every_token_is_predicted_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--load", str(folder))
    total, count = plain_loss(folder)
    assert found["tokens"] == count
    assert math.isclose(found["loss"], total / count, rel_tol=1e-12)
    assert math.isclose(found["perplexity"], math.exp(total / count), rel_tol=1e-12)
    assert math.isclose(found["bits_per_byte"], total / math.log(2) / found["bytes"], rel_tol=1e-12)
    assert found["bytes"] < count  # the end of a document has no label


def test_the_loss_equals_the_one_that_training_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, reported),) = evaluations(folder)
    found = result(capsys, "--load", str(folder), "--split", "valid", "--samples", "32", "--micro-batch-size", "3")
    assert math.isclose(found["loss"], reported, rel_tol=1e-12)
    assert found["tokens"] == 32 * 16


def losses(rank: int, world_size: int, folder: Path, layouts: list[list[str]]) -> list[float]:
    here = process.Runtime(rank, world_size, rank, torch.device("cpu"))
    found = []
    for layout in layouts:
        config = read_run(resolve(folder), [FP64, *layout], world_size)
        samples = evaluate.find_samples(config, ByteTokenizer(None), "whole", 21)
        executor = restore(config, ByteTokenizer(None), resolve(folder), here)
        found.append(evaluate.mean_loss(executor, config, samples, here.device))
    return found


def test_every_layout(folder: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluate 21 windows, which no batch size divides, on 8 ranks."""
    alone = result(capsys, "--load", str(folder), "--samples", "21")["loss"]
    layouts = [
        [
            f"parallel.tensor_parallel_mode={mode}",
            f"parallel.tensor_parallel_shape={list(entry.default_shape(size))}",
            f"parallel.pipeline_model_parallel_size={pipeline}",
            f"parallel.zero_stage={place % 4}",
        ]
        for place, ((mode, entry), size, pipeline) in enumerate(
            zip(MODES.items(), (8, 4, 4, 2, 2), (1, 2, 1, 2, 1), strict=True)
        )
    ]
    layouts.append(["parallel.context_parallel_size=4", "parallel.zero_stage=3"])
    for found in pool.run(losses, 8, folder, layouts):
        assert [loss for loss in found if not math.isclose(loss, alone, rel_tol=1e-10)] == []


def test_another_corpus_is_evaluated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "other", "A text of its own.\n\n" * 9)
    typed = ["--load", str(folder), f"data.data_path={tmp_path / 'other'}"]
    assert evaluate.main(typed) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "other") in said and "bits per byte" in said
    names = ["corpus", "tokens", "bytes", "loss", "perplexity", "bits"]
    assert [line.split()[0] for line in said.splitlines()] == names


BAD: dict[str, tuple[list[str], str]] = {
    "no run": (["--load", "nowhere"], "nowhere: there is no such folder"),
    "no corpus": (["data.data_path=nowhere"], "nowhere"),
    "an empty split": (["--split", "test"], "data.split=90,10,0: test is shorter than one sample of 17 tokens"),
    "another model": (["model.num_layers=3"], "saved with model.num_layers=2, but this run has 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    typed, words = BAD[name]
    code = process.run_program(lambda: evaluate.main(["--load", str(folder), *typed]))
    shown = capsys.readouterr()
    assert (code, shown.out) == (ExitCode.USER_ERROR, "") and words in shown.err


@pytest.mark.parametrize("typed", [["--samples", "0"], ["--micro-batch-size", "-1"], ["--split", "half"]])
def test_bad_options(typed: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        evaluate.make_parser().parse_args(["--load", "run", *typed])
    assert stopped.value.code == 2
