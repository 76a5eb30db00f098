"""Fact: texts begin and end with the tokens that the files of a Hugging Face folder declare, as in transformers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import models, processors

from megatron3d.data.preprocess.encode import EncoderSpec, encode_batch
from megatron3d.data.preprocess.inputs import InputChunk
from megatron3d.data.preprocess.readers import Record
from megatron3d.data.tokenizers.special_tokens import SpecialTokens, with_beginning
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from tools import generate

DEEPSEEK = "<｜end▁of▁sentence｜>"
WORDS = ("<unk>", "<s>", "</s>", "a", "b", "<|endoftext|>", "<|eot|>")
TEMPLATE = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
PROCESSORS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "none": (None, ()),
    "bytes": (processors.ByteLevel(), ()),
    "template": (TEMPLATE, (1,)),
    "sequence": (processors.Sequence([processors.ByteLevel(), TEMPLATE]), (1,)),
    "end": (processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)]), ()),
    "two": (
        processors.TemplateProcessing(single="<s> <|eot|> $A", special_tokens=[("<s>", 1), ("<|eot|>", 6)]),
        (1, 6),
    ),
    "roberta": (processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), (1,)),
}


def folder_of(
    folder: Path, processor: Any = None, words: tuple[str, ...] = WORDS, **files: dict[str, Any]
) -> Tokenizer:
    """Write a tokenizer.json and files next to it, and return the tokenizer."""
    library = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens([word for word in words if word.startswith("<")])
    if processor is not None:
        library.post_processor = processor
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return build_tokenizer("HuggingFaceTokenizer", str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_post_processor_says_what_a_text_begins_with(name: str, tmp_path: Path) -> None:
    processor, begin = PROCESSORS[name]
    ours = folder_of(tmp_path, processor, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.special.before_text(None) == begin
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    after = {"end": [2], "roberta": [2]}.get(name, [])  # what ends a text is never added to a prompt
    assert theirs("a b").input_ids == [*begin, *ours.encode("a b"), *after]


@pytest.mark.parametrize("declared", [True, False])
def test_add_bos_token_is_followed(declared: bool, tmp_path: Path) -> None:
    said = {"bos_token": {"content": "<s>", "special": True}, "add_bos_token": declared}
    assert folder_of(tmp_path, TEMPLATE, tokenizer_config=said).special.before_text(None) == ((1,) if declared else ())
    assert folder_of(tmp_path, None, tokenizer_config=said).special.before_text(None) == ((1,) if declared else ())


def test_an_option_overrides_what_is_declared(tmp_path: Path) -> None:
    special = folder_of(tmp_path, TEMPLATE, tokenizer_config={"bos_token": "<s>"}).special
    assert [special.before_text(asked) for asked in (None, True, False)] == [(1,), (1,), ()]
    special = folder_of(tmp_path, None, tokenizer_config={"bos_token": "<s>"}).special
    assert [special.before_text(asked) for asked in (None, True, False)] == [(), (1,), ()]
    with pytest.raises(UserError, match="add_bos_token=true: the tokenizer names no token that begins a text"):
        ByteTokenizer.special.before_text(True)


GENERATION, CONFIG = {"bos_token_id": 1, "eos_token_id": [6, 2]}, {"bos_token_id": 3, "eos_token_id": 4}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
ORDER: dict[str, tuple[dict[str, dict[str, Any]], int | None, tuple[int, ...]]] = {
    "nothing": ({}, None, (5,)),
    "names": ({"tokenizer_config": NAMES}, 1, (2,)),
    "a map": ({"special_tokens_map": NAMES}, 1, (2,)),
    "a configuration": ({"config": CONFIG, "tokenizer_config": NAMES}, 3, (4,)),
    "generation": ({"generation_config": GENERATION, "config": CONFIG, "tokenizer_config": NAMES}, 1, (6, 2)),
    "null": ({"generation_config": {"eos_token_id": None}, "config": CONFIG}, 3, (4,)),
    "outside": ({"generation_config": {"eos_token_id": [50256, -1]}, "config": CONFIG}, 3, (4,)),
    "in part": ({"config": {"eos_token_id": [99, 2, 2]}}, None, (2,)),
}


@pytest.mark.parametrize("name", ORDER)
def test_ids_come_from_the_first_file_that_names_them(name: str, tmp_path: Path) -> None:
    files, bos, ends = ORDER[name]
    ours = folder_of(tmp_path, **files)
    assert (ours.special.bos, ours.special.ends, ours.eod) == (bos, ends, ends[0])


def test_the_end_of_deepseek_is_known(tmp_path: Path) -> None:
    assert folder_of(tmp_path, words=(*WORDS[:2], DEEPSEEK)).eod == 2


@pytest.mark.parametrize(
    "files,words",
    [
        ({"config": {"eos_token_id": "2"}}, r'config.json: eos_token_id="2": must be a token id or a list'),
        ({"generation_config": {"eos_token_id": [True]}}, r"generation_config.json: eos_token_id=\[true\]"),
        ({"tokenizer_config": {"add_bos_token": "false"}}, 'add_bos_token="false": must be true or false'),
        ({"tokenizer_config": [1]}, "tokenizer_config.json: is not a JSON object"),
    ],
)
def test_damaged_files_are_refused(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        folder_of(tmp_path, **files)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"tokenizer_config.json: cannot be read as JSON"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    folder_of(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config.json: cannot be read as JSON .*not a regular file"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize(
    "old,new,words",
    [('"id":"<s>","type', '"id":"x","type', "adds 'x', which it does not describe"), ("[1]", "[99]", "adds token 99")],
)
def test_damaged_post_processors_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    folder_of(tmp_path, TEMPLATE)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")).replace(old, new))
    with pytest.raises(UserError, match=words):
        build_tokenizer("HuggingFaceTokenizer", str(path))


def test_files_next_to_another_name_are_not_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path, config=CONFIG)
    (tmp_path / "tokenizer.json").rename(tmp_path / "data.tokenizer.json")
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "data.tokenizer.json")).eod == 5


def pieces(**options: Any) -> bytes:
    model = io.BytesIO()
    text = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=300, minloglevel=2, **options
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "config,begin",
    [
        (None, ()),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}, (1,)),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "bos_token": "<s>"}, ()),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, (1,)),
        ({"tokenizer_class": "T5Tokenizer"}, ()),
        ({"tokenizer_class": ["LlamaTokenizer"], "bos_token": "\ud800", "eos_token": 2}, ()),
    ],
)
def test_sentencepiece_models_declare_it_next_to_them(
    config: dict[str, Any] | None, begin: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.model")).special
    assert (special.prepended, special.ends) == (begin, (2,))
    assert special.before_text(True) == (1,)


def test_a_text_without_context_follows_the_bos_token(tmp_path: Path) -> None:
    """As in lm_eval: the tokenizer's bos_token, whether it is added or not, else its end."""
    assert folder_of(tmp_path).special.prefix == 5
    assert folder_of(tmp_path, config=CONFIG).special.prefix == 4
    assert folder_of(tmp_path, tokenizer_config=NAMES).special.prefix == 1


def test_it_is_not_added_twice() -> None:
    assert with_beginning((1,), [5]) == [1, 5] == with_beginning((1,), [1, 5])
    assert (with_beginning((), [5]), with_beginning((1,), [])) == ([5], [1])


def test_prompts_begin_with_it(tmp_path: Path) -> None:
    ours = folder_of(tmp_path, TEMPLATE)
    assert generate.encode(["a b", "<s> a", ""], ours, ours.special.before_text(None)) == [[1, 3, 4], [1, 3], [1]]
    with pytest.raises(UserError, match="--prompt '': no token"):
        generate.encode([""], ours, ())


def test_documents_begin_with_it(tmp_path: Path) -> None:
    """Once, before the first section or sentence; empty documents stay empty."""
    ours = folder_of(tmp_path, TEMPLATE)
    path = str(tmp_path / "tokenizer.json")
    spec = EncoderSpec("HuggingFaceTokenizer", path, ours.fingerprint, ("text",), append_eod=True, begin=(1,))
    lines, text = (InputChunk(kind, "x", 0, 9, 9) for kind in ("lines", "text"))
    records = [
        Record(lines, 0, 3, b'{"text": "a b"}', 3),
        Record(lines, 3, 6, b'{"text": ""}', 3),
        Record(text, 0, 4, "a", 4, ends=False),
        Record(text, 4, 8, "b", 4),
    ]
    ((tokens, lengths, _),) = encode_batch(spec, records).columns
    assert np.array_equal(tokens, [1, 3, 4, 5, 1, 3, 4, 5]) and list(lengths) == [4, 2, 2]


def test_nothing_is_known_of_a_bare_vocabulary() -> None:
    assert (SpecialTokens().eod, SpecialTokens().before_text(None)) == (None, ())
