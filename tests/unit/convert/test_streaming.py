"""Fact: a conversion holds a few tensors, whatever the model's size, and a full disk leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.convert import compare
from megatron3d.convert.config_json import write_settings
from megatron3d.convert.conversion import ConversionRequest, from_hub, to_hub
from megatron3d.convert.hub_weights import divide, rows_of, write_shards
from megatron3d.convert.tensor_names import FileTensor, file_tensors
from megatron3d.errors import UserError
from tests.support.hub_models import GPT2, LLAMA, write_hub
from tests.support.tiny_run import ROOT

LARGE = {"family": "llama", "num_layers": 10, "hidden_size": 512, "num_attention_heads": 4, "seq_length": 8}
# Converts folder 1 of the command line in both directions after folder 0, and prints the growth of the peak in bytes.
PROGRAM = """
import resource, sys
from pathlib import Path
from megatron3d.convert.conversion import ConversionRequest, from_hub, to_hub
peaks = []
for hub in map(Path, sys.argv[1:]):
    run, back = hub.with_name(hub.name + "_run"), hub.with_name(hub.name + "_back")
    common = {"tokenizer_type": "ByteTokenizer", "with_transformers": False, "with_logits": False}
    from_hub(ConversionRequest(hub, run, **common))
    to_hub(ConversionRequest(run, back, max_shard_bytes=2**25, **common))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""


def write_model(folder: Path, shape: dict[str, object]) -> Path:
    """Write a folder of any size, tensor by tensor."""
    arch = resolve_architecture(ModelConfig.model_validate(shape), 1000)
    model_type, settings, _ = write_settings(arch)
    table = file_tensors(arch, model_type)

    def values() -> Iterator[torch.Tensor]:
        for tensor in table:
            yield torch.full(tensor.shape, 0.5)

    folder.mkdir()
    write_shards(folder, divide(table, torch.float32, 2**25), torch.float32, values())
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    """110 MB in tensors of at most 6 MB need a few tensors' memory in both directions."""
    small = write_model(tmp_path / "small", {**LARGE, "num_layers": 1, "hidden_size": 64})
    large = write_model(tmp_path / "large", {**LARGE, "ffn_hidden_size": 1536})
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert size > 110e6 and int(done.stdout) < 30e6
    names = sorted(path.name for path in (tmp_path / "large_back").glob("*.safetensors"))
    assert names[0] == "model-00001-of-00005.safetensors" and len(names) == 5


def test_rows_of_parts_alternate_by_group() -> None:
    """Queries of two groups of heads with three rows each, and keys of one row: q q q k q q q k."""
    tensor = FileTensor("qkv", (("q", (6, 2)), ("k", (2, 2))), is_transposed=True, num_groups=2)
    values = torch.arange(16).view(8, 2).T
    found = {name: torch.full(shape, -1) for name, shape in tensor.parts}
    for rows in tensor.row_ranges():
        found[rows.name][tuple(slice(*ends) for ends in rows.box)] = rows_of(values, rows)
    assert found["q"][:, 0].tolist() == [0, 2, 4, 8, 10, 12]
    assert found["k"].tolist() == [[6, 7], [14, 15]]


@pytest.mark.parametrize(
    "settings", [GPT2, {**LLAMA, "tie_word_embeddings": True}, LLAMA], ids=["gpt2", "tied", "llama"]
)
def test_logits_of_some_tokens_are_compared(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large vocabulary is compared at the tokens of the inputs and at evenly spread ones."""
    hub = write_hub(tmp_path / "hub", {**settings, "vocab_size": 400})
    monkeypatch.setattr(compare, "MAX_ROWS", 9)
    report = from_hub(ConversionRequest(hub, tmp_path / "run"))
    assert [each.holds for each in report.agreements] == [True, True]
    tokens = compare.stored_inputs(400, 16)
    rows = compare.compared_rows(400, tokens)
    assert len(rows) < 50 and {0, 399, *tokens.flatten().tolist()} <= set(rows.tolist())
    assert [each.holds for each in to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back")).agreements] == [
        True
    ] * 2


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """No file may be larger than 8 KB, which fails as a full disk does, in the middle of the weights."""
    hub = write_hub(tmp_path / "hub", LLAMA)
    command = (
        f"ulimit -f 8; exec {sys.executable} tools/convert_checkpoint.py from-hf --input {hub} --output {tmp_path}/run"
    )
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


CODE = {
    "auto_map": ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "", "auto_map in config.json"),
    "a file": ({}, "modeling_x.py", "modeling_x.py"),
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_another_model_is_refused_and_none_is_run(name: str, tmp_path: Path) -> None:
    """A folder whose model transformers has without the code converts, with a note; its code would end the test."""
    hub, (fields, file, words) = write_hub(tmp_path / "hub", LLAMA), CODE[name]
    if file:
        (hub / file).write_text("raise SystemExit")
    settings = {**json.loads((hub / "config.json").read_text()), **fields}
    (hub / "config.json").write_text(json.dumps(settings))
    notes = from_hub(ConversionRequest(hub, tmp_path / "run")).notes
    assert f"{words}: code is never run; the model is LlamaForCausalLM as transformers has it" in notes
    for architectures in (None, ["XForCausalLM"]):
        (hub / "config.json").write_text(json.dumps({**settings, "architectures": architectures}))
        with pytest.raises(UserError) as raised:
            from_hub(ConversionRequest(hub, tmp_path / "other"))
        (problem,) = raised.value.problems
        assert words in problem and "never run here" in problem
