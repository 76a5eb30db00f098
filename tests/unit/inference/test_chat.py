"""Fact: a conversation becomes the text that transformers makes of it by the chat template of a tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron3d.errors import UserError
from megatron3d.inference.chat import FILE, find_template
from tools import train_tokenizer

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
STRICT = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('the system speaks first') }}
    {%- endif %}
    {%- if message.role == 'silent' %}{% continue %}{% endif %}
    {{- '[' ~ message.role ~ '] ' ~ message.content | tojson ~ eos_token }}
{%- endfor %}
{{- strftime_now('%Y') }}"""
TEMPLATES = {"chatml": CHATML, "strict": STRICT}
TALK = [
    {"role": "system", "content": "Be <brief> & “kind”."},
    {"role": "user", "content": "  größe?\n"},
    {"role": "silent", "content": "-"},
    {"role": "assistant", "content": "12 €"},
    {"role": "user", "content": 'and "this"'},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tokenizer of byte-level BPE."""
    monkeypatch.setattr(train_tokenizer, "train_in_child", train_tokenizer.train)
    (tmp_path / "text.txt").write_text("a conversation of a user and an assistant\n" * 20)
    typed = ["--input", str(tmp_path / "text.txt"), "--type", "byte-bpe", "--vocab-size", "280"]
    assert train_tokenizer.main([*typed, "--output-prefix", str(tmp_path / "made")]) == 0
    (tmp_path / "made.tokenizer.json").rename(tmp_path / "tokenizer.json")
    return tmp_path


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("place", ["settings", "list", "file"])
def test_the_text_is_that_of_transformers(folder: Path, name: str, place: str) -> None:
    template, tokens = TEMPLATES[name], {"bos_token": "<|endoftext|>", "eos_token": {"content": "</s>"}}
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    values = {"settings": {"chat_template": template}, "list": {"chat_template": several}, "file": {}}[place]
    write_settings(folder, **tokens, **values)
    if place == "file":
        (folder / FILE).write_text(template)
    peer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="</s>"
    )
    expected = peer.apply_chat_template(TALK, chat_template=template, add_generation_prompt=True, tokenize=False)
    for path in (folder, folder / "tokenizer.json"):
        found = find_template(str(path))
        assert found is not None and found.render(TALK) == expected


def test_where_there_is_none(folder: Path) -> None:
    assert find_template(None) is None and find_template(str(folder)) is None
    write_settings(folder, chat_template=[{"name": "tool_use", "template": "no"}])
    assert find_template(str(folder)) is None
    write_settings(folder, chat_template=CHATML)
    (folder / "tokenizer.json").rename(folder / "mine.json")
    assert find_template(str(folder / "mine.json")) is None, "it describes another tokenizer"


def test_what_a_template_refuses_is_an_error_and_what_it_tries_does_nothing(folder: Path) -> None:
    """Templates are read from strangers: they run in a sandbox."""
    for source, words in (
        (STRICT, "the system speaks first"),
        ("{{ missing.field }}", "undefined"),
        ("{% for", "unexpected 'end of template'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ):
        (folder / FILE).write_text(source)
        found = find_template(str(folder))
        assert found is not None
        with pytest.raises(ValueError, match=words):
            found.render([TALK[1], TALK[0]])


def test_damaged_files_are_named(folder: Path) -> None:
    for content, words in ((b"[]", "is not a JSON object"), (b"{", "cannot be read as JSON"), (b"\xff", "as text")):
        (folder / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UserError, match=f"tokenizer_config.json.*{words}"):
            find_template(str(folder))
