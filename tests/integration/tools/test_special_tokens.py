"""Fact: tools begin and end texts with the tokens that a converted tokenizer declares, as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from megatron3d.data.token_files.indexed import IndexedDataset
from tests.support.hub_models import LLAMA, write_hub
from tests.support.preprocess_jobs import write_jsonl
from tools import convert_checkpoint, generate, preprocess_data

PROMPT = "w5 w6 w7"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokenizer puts <s> before every text."""
    folder = write_hub(tmp_path_factory.mktemp("hub") / "hub", LLAMA, seed=3)
    words = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 37))))}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def greedy(hub: Path, ends: list[int], adds_bos: bool = True) -> str:
    """Return what transformers generates, the prompt included."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(hub, local_files_only=True, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub, local_files_only=True)
    encoded = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=adds_bos)
    ids = model.generate(
        **encoded, max_new_tokens=8, do_sample=False, eos_token_id=ends, pad_token_id=0, bos_token_id=None
    )
    return str(tokenizer.decode(ids[0][ids[0] != 0], skip_special_tokens=True))


def generated(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    typed = ["--load", str(run), "--prompt", PROMPT, "--max-new-tokens", "8", "--temperature", "0", *more]
    assert generate.main(typed) == 0
    return capsys.readouterr().out.removesuffix("\n")


def convert(hub: Path, run: Path) -> Path:
    assert convert_checkpoint.main(["from-hf", "--input", str(hub), "--output", str(run)]) == 0
    return run


def test_prompts_begin_as_in_transformers(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = convert(hub, tmp_path / "run")
    assert generated(run, capsys) == greedy(hub, [2])
    assert generated(run, capsys, "data.add_bos_token=false") == greedy(hub, [2], adds_bos=False)


def test_generation_stops_at_any_end(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = greedy(hub, [2]).split()
    end = int(whole[5][1:])  # the third new token, unless an earlier one is the same
    (hub / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    assert generated(convert(hub, tmp_path / "run"), capsys) == " ".join(whole[: whole.index(f"w{end}", 3)])


def test_documents_begin_as_declared_unless_told(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "w5 w6"}, {"text": "w7"}])
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(hub)]
    for flags, begin in (([], [1]), (["--no-add-bos-token"], []), (["--add-bos-token"], [1])):
        prefix = tmp_path / f"out{len(flags)}{len(begin)}"
        typed = ["--input", str(source), "--output-prefix", str(prefix), *tokenizer, "--workers", "1", *flags]
        assert preprocess_data.main(typed) == 0
        data = IndexedDataset(Path(f"{prefix}_text_document"))
        assert [data.sequences(i)[0].tolist() for i in range(2)] == [[*begin, 5, 6], [*begin, 7]]
        said = "every document begins with token 1; --no-add-bos-token leaves it out"
        assert (said in capsys.readouterr().out) == bool(begin)


def test_a_token_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    typed = ["--input", str(source), "--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "ByteTokenizer"]
    assert preprocess_data.main([*typed, "--add-bos-token"]) == 2
    assert "the tokenizer names no token that begins a text" in capsys.readouterr().err
