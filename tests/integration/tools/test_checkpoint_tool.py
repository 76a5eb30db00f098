"""Fact: tools/checkpoint.py describes checkpoints, finds every damage and difference, and averages exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron3d.errors import ExitCode, UserError
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run, run_as_rank, stored, tree, write_config
from tools import checkpoint, generate

FP64 = ["train.precision=fp64", "train.train_iters=4", "optimizer.lr_warmup_iters=0"]
SAVES = "checkpoint.save_interval=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """Return `one` and `other`, the same 4 iterations on one process and in 3-D on 8 ranks; `seed` has another seed."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder)
    for name, asked in (("one", []), ("seed", ["train.seed=5"])):
        assert run(config, *in_run(str(folder / name)), *FP64, SAVES, *asked).code == ExitCode.DONE
    cube = ["parallel.tensor_parallel_mode=3d", "parallel.tensor_parallel_shape=[2,2,2]"]
    asked = [[*in_run(str(folder / "other")), *FP64, SAVES, *cube]]  # type: ignore[list-item]
    assert pool.run(run_as_rank, 8, config, asked) == [[ExitCode.DONE]] * 8
    return folder


def test_inspect(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["inspect", str(runs / "other"), "--tensors"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert f"{runs}/other/iter_0000004: megatron3d checkpoint, version 2, iteration 4" in said
    weights = [tensor for name, tensor in stored(runs / "one", 4).items() if name.startswith("model.")]
    count, numel = len(weights), sum(tensor.numel() for tensor in weights)
    assert f"model: {count} tensors, {numel:,} elements, {numel * 8 / 2**20:,.1f} MiB" in said
    assert f"optimizer.exp_avg_sq: {count} tensors" in said and "boxes in 8 files" in said
    for words in (
        "identity.train.seed = 1234",
        "mesh.x = 2",
        'config.train.precision = "fp64"',
        "model.num_layers = 2",
    ):
        assert f"  {words}\n" in said
    assert "  model.embedding.weight [257, 32] float64, boxes: 8\n" in said


def test_verify(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["verify", str(runs / "one"), str(runs / "other/iter_0000004")]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    good = [runs / "one/iter_0000004", runs / "one/iter_0000002", runs / "other/iter_0000004"]
    assert lines == [f"{folder}: complete and undamaged" for folder in good]
    shutil.copytree(runs / "other", tmp_path / "bad")
    for file, place in (("iter_0000002/rank_00003.safetensors", -9), ("iter_0000004/rank_00005.safetensors", -1)):
        content = bytearray((tmp_path / "bad" / file).read_bytes())
        content[place] ^= 8
        (tmp_path / "bad" / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        checkpoint.main(["verify", str(tmp_path / "bad"), str(tmp_path / "none")])
    first, second, third = caught.value.problems
    assert first.startswith(f"{tmp_path}/bad/iter_0000004: rank_00005.safetensors: ") and "is damaged" in first
    assert second.startswith(f"{tmp_path}/bad/iter_0000002: rank_00003.safetensors: ") and "is damaged" in second
    assert third.startswith(f"{tmp_path}/none: there is no checkpoint")


def test_diff(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layouts differ in rounding, two seeds in every number, a checkpoint and itself in nothing."""
    assert checkpoint.main(["diff", str(runs / "one"), str(runs / "one/iter_0000004")]) == ExitCode.DONE
    assert capsys.readouterr().out == "equal\n"
    assert checkpoint.main(["diff", str(runs / "one"), str(runs / "other")]) == checkpoint.EXIT_DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert "mesh.x: None -> 2" in lines and "config.parallel.tensor_parallel_mode: 1d -> 3d" in lines
    shares = [float(line.split(", ")[1].split()[0]) for line in lines if line.startswith("model.embedding")]
    assert shares and max(shares) < 1e-10
    assert checkpoint.main(["diff", str(runs / "one"), str(runs / "seed")]) == checkpoint.EXIT_DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert "identity.train.seed: 1234 -> 5" in lines
    assert any(line.startswith("model.embedding.weight: 8224 elements differ by at most ") for line in lines)


def test_average(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The average of three checkpoints of two layouts is their mean, usable for sampling and fine-tuning."""
    sources = [runs / "one/iter_0000002", runs / "other/iter_0000004", runs / "seed"]
    assert checkpoint.main(["average", *map(str, sources), "--save", str(tmp_path / "mean")]) == ExitCode.DONE
    got = stored(tmp_path / "mean", 4)
    each = [stored(runs / name, i) for name, i in (("one", 2), ("other", 4), ("seed", 4))]
    assert got.keys() == {name for name in each[0] if name.startswith("model.")}
    for name, values in got.items():
        expected = torch.stack([tensors[name] for tensors in each]).mean(0)
        assert (values - expected).abs().max() <= 1e-15
    capsys.readouterr()
    assert generate.main(["--load", str(tmp_path / "mean"), "--max-new-tokens", "3"]) == ExitCode.DONE
    config = runs / "tiny.yaml"
    refused = run(config, *FP64, "checkpoint.save=null", f"checkpoint.load={tmp_path}/mean", "train.seed=5")
    assert refused.code == ExitCode.USER_ERROR and "holds weights only; set checkpoint.finetune=true" in refused.err
    places = [f"checkpoint.save={tmp_path}/tuned", f"checkpoint.load={tmp_path}/mean"]
    assert run(config, *FP64, *places, "checkpoint.finetune=true").code == ExitCode.DONE
    before = tree(tmp_path / "mean")
    with pytest.raises(UserError, match="has a checkpoint already; name a new folder"):
        checkpoint.main(["average", *map(str, sources), "--save", str(tmp_path / "mean")])
    assert tree(tmp_path / "mean") == before


def test_checkpoints_that_cannot_be_averaged_are_refused(runs: Path, tmp_path: Path) -> None:
    config = runs / "tiny.yaml"
    assert run(config, *in_run(f"{tmp_path}/wide"), *FP64, "model.hidden_size=64").code == ExitCode.DONE
    with pytest.raises(UserError) as caught:
        checkpoint.main(["average", str(runs / "one"), str(tmp_path / "wide"), "--save", str(tmp_path / "mean")])
    assert f"{tmp_path}/wide/iter_0000004 has model.hidden_size=64, but {runs}/one/iter_0000004 has 32" in str(
        caught.value
    )
    assert not (tmp_path / "mean").exists()


def test_control_characters_of_an_index_do_not_reach_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values are shown as JSON, which has no control characters; names with control characters are refused."""
    assert checkpoint.main(["inspect", str(runs / "one")]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert all(json.dumps(line)[1:-1].replace('\\"', '"') == line for line in said.splitlines())
