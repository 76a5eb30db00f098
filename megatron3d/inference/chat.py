"""Conversations as text, by the chat template of a Hugging Face folder, as transformers renders it.

    chat_template.jinja      {% for message in messages %}...
    tokenizer_config.json    chat_template: the same, or a list of them; bos_token: <s>, eos_token: </s>

(https://huggingface.co/docs/transformers/chat_templating_writing)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron3d.data.tokenizers.special_tokens import MAX_BYTES, MODEL_NAMES, NAMES
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import read_limited

FILE = "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the texts of the tokens that begin and end a text."""

    source: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation up to where the assistant answers.

        Raises ValueError where the template refuses the messages, or cannot be rendered.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            template = environment.from_string(self.source)
            return template.render(messages=[*map(dict, messages)], add_generation_prompt=True, **self.tokens)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def find_template(tokenizer_model: str | None) -> ChatTemplate | None:
    """Return the chat template of a tokenizer's folder, None where it has none; raises UserError for a damaged file."""
    if tokenizer_model is None:
        return None
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name not in MODEL_NAMES:
        return None  # files next to a model of another name describe other tokenizers
    settings = _settings(folder / NAMES[0])
    source = _text(folder / FILE) or _of_settings(settings.get("chat_template"))
    if not source:
        return None
    named = {key: settings.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return ChatTemplate(source, {key: text for key, text in texts.items() if isinstance(text, str)})


def _of_settings(value: Any) -> str | None:
    """Return the template among those of the settings: the only one, or the one that is named default."""
    if isinstance(value, list):
        value = next((each.get("template") for each in value if each.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _settings(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); correct it, or remove it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; correct it, or remove it")
    return value


def _text(path: Path) -> str | None:
    try:
        return read_limited(path, MAX_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error}); correct it, or remove it") from error
