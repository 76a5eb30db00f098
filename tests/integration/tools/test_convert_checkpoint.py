"""Fact: a folder that cannot be converted is refused in one message with exit code 2, and no output is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron3d.config.read import read_config
from megatron3d.convert import compare
from tests.support.hub_models import GPT2, LLAMA, write_hub
from tests.support.tiny_run import run as train
from tests.support.tiny_run import write_config
from tools import convert_checkpoint, generate

Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with several weight files."""
    return write_hub(tmp_path_factory.mktemp("hub") / "hub", LLAMA, max_shard_size="6KB")


def convert(direction: str, source: Path, target: Path, *options: str) -> int:
    return convert_checkpoint.main([direction, "--input", str(source), "--output", str(target), *options])


def edit(name: str, **changes: object) -> Damage:
    def change(hub: Path) -> None:
        path = hub / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut(hub: Path) -> None:
    path = sorted(hub.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])


def drop(hub: Path) -> None:
    change_tensors(hub, lambda tensors: {name: value for name, value in tensors.items() if name != "model.norm.weight"})


def change_tensors(hub: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Apply a change to all tensors and write them to one file."""
    tensors = {name: value for path in hub.glob("model-*") for name, value in load_file(path).items()}
    for path in hub.glob("model*safetensors*"):
        path.unlink()
    save_file(change(tensors), hub / "model.safetensors", {"format": "pt"})


def pickles_only(hub: Path) -> None:
    for path in hub.glob("model*safetensors*"):
        path.unlink()
    (hub / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00exit\x85R.")


BAD: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "hub/config.json: cannot be read (No such file"),
    "no config.json": (lambda hub: (hub / "config.json").unlink(), "config.json: cannot be read"),
    "config.json of text": (lambda hub: (hub / "config.json").write_text("{"), "config.json: is not JSON"),
    "config.json of a list": (lambda hub: (hub / "config.json").write_text("[]"), "config.json: is not a JSON object"),
    "another model": (edit("config.json", model_type="falcon"), 'model_type="falcon": megatron3d has the models'),
    "another size": (edit("config.json", intermediate_size=21), "mlp.gate_proj.weight is [20, 24], and [21, 24] in"),
    "a missing file": (
        lambda hub: sorted(hub.glob("model-*.safetensors"))[0].unlink(),
        "files that model.safetensors.index.json names are not there: model-00001-of",
    ),
    "a truncated file": (cut, "is no whole safetensors file"),
    "a file of text": (
        lambda hub: sorted(hub.glob("model-*.safetensors"))[0].write_text("version https://git-lfs"),
        "is no whole safetensors file",
    ),
    "an index that leads out": (
        edit("model.safetensors.index.json", weight_map={"x": "../../etc/x.safetensors"}),
        "its weight_map is not from tensors to files next to it",
    ),
    "an index of nothing": (edit("model.safetensors.index.json", weight_map={}), "its weight_map is not"),
    "an index of text": (
        lambda hub: (hub / "model.safetensors.index.json").write_text("x"),
        "no weight_map can be read",
    ),
    "a pickle": (pickles_only, "pytorch_model.bin is a pickle, which can run any program when it is read"),
    "no weights": (
        lambda hub: [path.unlink() for path in hub.glob("model*safetensors*")],
        "there is neither model.safetensors nor model.safetensors.index.json",
    ),
    "a missing tensor": (drop, "tensor model.norm.weight [24] of the model that config.json describes is in no file"),
    "another tensor": (
        lambda hub: change_tensors(hub, lambda tensors: {**tensors, "adapter": torch.ones(2)}),
        "tensor adapter [2] is not in the model",
    ),
    "integers": (
        lambda hub: change_tensors(
            hub, lambda t: {n: v.to(torch.int8) if n == "lm_head.weight" else v for n, v in t.items()}
        ),
        "lm_head.weight is of type I8, not one of F32, BF16, F16, F64",
    ),
    "no tokenizer": (
        lambda hub: (hub / "tokenizer.json").unlink(),
        "there is neither tokenizer.json nor tokenizer.model; name the model's tokenizer with --tokenizer-type",
    ),
    "another tokenizer": (lambda hub: (hub / "tokenizer.json").write_text("{}"), "not a tokenizer.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    damage, words = BAD[name]
    hub = shutil.copytree(whole, tmp_path / "hub")
    damage(hub)
    code, shown = convert("from-hf", hub, tmp_path / "run"), capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert words in shown.err.splitlines()[0] and "Traceback" not in shown.err
    assert {path.name for path in tmp_path.iterdir()} <= {"hub"}


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("from-hf", whole, tmp_path / "run", "--tokenizer-type", "ByteTokenizer") == 2
    assert "the tokenizer has 257 tokens, the model vocab_size=37" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_a_folder_is_never_overwritten(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    source = whole
    if direction == "to-hf":
        assert convert("from-hf", whole, source := tmp_path / "source") == 0
    (tmp_path / "run").mkdir()
    assert convert(direction, source, tmp_path / "run") == 2
    assert "run: exists already; name a new folder" in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []


def test_files_of_a_killed_conversion_are_removed(whole: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.tmp").mkdir()
    (tmp_path / ".run.tmp" / "half").write_text("x")
    assert convert("from-hf", whole, tmp_path / "run") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and not (tmp_path / "run" / "half").exists()


def test_differing_logits_are_reported(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "PLAIN_TOLERANCE", 1e-30)
        assert convert("from-hf", whole, tmp_path / "run") == convert_checkpoint.DIFFERENT
    assert capsys.readouterr().err.startswith("DIFFERENT: the converted model computes other logits")
    assert list(tmp_path.iterdir()) == []


def test_the_output_of_a_conversion(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("from-hf", whole, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "a plain forward of the files' tensors in float64: largest difference" in said
    assert "against transformers" in said and said.endswith(f"EQUAL: {tmp_path / 'run'}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "has_transformers", lambda: False)
        patch.setattr(convert_checkpoint, "has_transformers", lambda: False)
        assert convert("to-hf", tmp_path / "run", tmp_path / "back", "--max-shard-size", "5KB") == 0
    said = capsys.readouterr().out
    assert "transformers is not installed, so that its own model was not run" in said and "against transf" not in said
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()


def test_a_missing_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("to-hf", tmp_path / "nowhere", tmp_path / "hub") == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["--max-shard-size", "5"], ["--max-shard-size", "0GB"], ["--dtype", "int8"]])
def test_bad_options(typed: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        convert_checkpoint.main(["to-hf", "--input", "a", "--output", "b", *typed])
    assert stopped.value.code == 2


UNUSED = {
    "from-hf": (["--model-type", "llama"], ["--max-shard-size", "1GB"], ["--tokenizer-model", "x"]),
    "to-hf": (["--seq-length", "5"], ["--tokenizer-model", "x"]),
    "config": (["--dtype", "bf16"], ["--without-logits"], ["--without-transformers"], ["--max-shard-size", "1GB"]),
}


@pytest.mark.parametrize("direction", UNUSED)
def test_options_without_effect_are_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    for typed in UNUSED[direction]:
        assert convert(direction, whole, tmp_path / "out", *typed) == 2
        assert f"{typed[0]}" in (said := capsys.readouterr().err) and "not used with" in said


def test_a_trained_run_survives_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(write_config(tmp_path), "train.train_iters=3").code == 0
    capsys.readouterr()
    assert convert("to-hf", tmp_path / "run", tmp_path / "hub") == 0
    assert convert("from-hf", tmp_path / "hub", tmp_path / "back", "--tokenizer-type", "ByteTokenizer") == 0
    capsys.readouterr()
    said = []
    for folder in ("run", "back"):
        typed = ["--load", str(tmp_path / folder), "--prompt", "def ", "--max-new-tokens", "8", "--temperature", "0"]
        assert generate.main(typed) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    more = ["checkpoint.finetune=true", "train.train_iters=2"]
    more += [f"checkpoint.load={tmp_path / 'back'}", f"checkpoint.save={tmp_path / 'more'}"]
    tuned = train(tmp_path / "tiny.yaml", *more)
    assert (tuned.code, tuned.err) == (0, "")


def test_the_configuration_of_a_run_that_starts_from_a_folder(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has what the folder says, and nothing else."""
    path = tmp_path / "start.yaml"
    assert convert("config", whole, path, "--seq-length", "8") == 0
    assert capsys.readouterr().out.endswith(f"WRITTEN: {path}\n")
    config = read_config(path).config
    assert convert("from-hf", whole, tmp_path / "run", "--seq-length", "8", "--without-logits") == 0
    assert capsys.readouterr().out.endswith(f"logits were not compared (--without-logits)\nCONVERTED: {tmp_path}/run\n")
    assert config.model == read_config(tmp_path / "run" / "config.yaml").config.model
    assert (config.checkpoint.load, config.checkpoint.finetune) == (str(whole), True)
    assert config.data.tokenizer_model == str(whole / "tokenizer.json")
    assert convert("config", whole, path) == 2
    assert "start.yaml: exists already; name a new file" in capsys.readouterr().err


def test_a_gpt2_run_survives_export_and_import(tmp_path: Path) -> None:
    assert convert("from-hf", write_hub(tmp_path / "hub", GPT2), tmp_path / "run", "--dtype", "bf16") == 0
    assert convert("to-hf", tmp_path / "run", tmp_path / "back") == 0
