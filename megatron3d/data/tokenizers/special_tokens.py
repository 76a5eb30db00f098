"""Tokens that begin and end a text, as the files of a Hugging Face folder declare them.

    generation_config.json, config.json    bos_token_id: 1, eos_token_id: 2, or a list
    tokenizer_config.json                  bos_token: <s>, eos_token: </s>, add_bos_token: true
    tokenizer.json                         a post-processor that puts <s> before every text

Ids are taken from the first of the files, in this order, that names one of the vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import read_limited

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<eod>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",  # DeepSeek's, with a fullwidth bar
)
# Bytes of a file of settings; chat templates and lists of added tokens are far smaller.
MAX_BYTES = 1 << 26
IDS = ("generation_config.json", "config.json")
NAMES = ("tokenizer_config.json", "special_tokens_map.json")
# Names of model files in Hugging Face folders; files next to a model of another name describe other tokenizers.
MODEL_NAMES = ("tokenizer.json", "tokenizer.model")
# Classes of transformers that add the token that begins a text unless told otherwise.
_ADD_BOS = tuple(f"{name}Tokenizer{kind}" for name in ("Llama", "CodeLlama", "Gemma") for kind in ("", "Fast"))


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that begin and end texts.

    Attributes:
        bos: token that begins a text, None if nothing names one.
        prepended: tokens that the tokenizer puts before every text; empty if it adds none.
        ends: tokens at which generation stops; the first one also ends a document.
        prefix: token before a text without a context, as in lm_eval: the tokenizer's `bos_token`, else its end.
    """

    bos: int | None = None
    prepended: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    prefix: int | None = None

    @property
    def eod(self) -> int | None:
        """The token that ends a document."""
        return self.ends[0] if self.ends else None

    def before_text(self, add_bos: bool | None) -> tuple[int, ...]:
        """Return the tokens before a text; `add_bos` None follows the tokenizer.

        Raises UserError where the token is asked for and there is none.
        """
        if add_bos is None or (add_bos and self.prepended):
            return self.prepended
        if add_bos and self.bos is None:
            raise UserError(
                "add_bos_token=true: the tokenizer names no token that begins a text; leave it out, or name bos_token "
                "in the tokenizer_config.json next to its file"
            )
        return (self.bos,) if add_bos and self.bos is not None else ()


def with_beginning(begin: Sequence[int], tokens: list[int]) -> list[int]:
    """Return a text's tokens after those that begin a text, which are not repeated where the text has them."""
    return tokens if tokens[: len(begin)] == [*begin] else [*begin, *tokens]


@dataclass(frozen=True)
class Vocabulary:
    """What a model file itself says: the id of a token by its name, and the tokens that begin and end a text."""

    size: int
    find: Callable[[str], int | None]
    bos: int | None = None
    end: int | None = None
    template: tuple[int, ...] = ()


def declared_tokens(path: Path, vocabulary: Vocabulary) -> SpecialTokens:
    """Return the tokens that a model file and the files next to it declare; raises UserError for damaged ones."""
    wrong = next((i for i in vocabulary.template if i >= vocabulary.size), None)
    if wrong is not None:
        raise UserError(f"{path}: its post_processor adds token {wrong}, not one of its {vocabulary.size}; correct it")
    is_named = path.name in MODEL_NAMES
    files = {name: _read(path.parent / name) for name in (*IDS, *NAMES)} if is_named else {}
    ids_bos, ids_end = (_named(path.parent, files, kind, vocabulary) for kind in ("bos", "eos"))
    own_bos = _by_name(files, "bos_token", vocabulary)
    bos = _first(*vocabulary.template, own_bos, *ids_bos, vocabulary.bos)
    prepended = vocabulary.template or (() if bos is None else (bos,))
    if not _adds_bos(path, files, vocabulary):
        prepended = ()
    ends = ids_end or (() if vocabulary.end is None else (vocabulary.end,))
    return SpecialTokens(_first(*ids_bos, bos), prepended, ends, _first(own_bos, *prepended, *ends))


def _adds_bos(path: Path, files: Mapping[str, Any], vocabulary: Vocabulary) -> bool:
    """Return whether the tokenizer declares to put a token before every text."""
    options = files.get(NAMES[0], {})
    declared = options.get("add_bos_token")
    if declared is None:
        by_class = path.name == "tokenizer.model" and options.get("tokenizer_class") in _ADD_BOS
        return bool(vocabulary.template) or by_class
    if not isinstance(declared, bool):
        where = path.parent / NAMES[0]
        raise UserError(f"{where}: add_bos_token={json.dumps(declared)[:80]}: must be true or false; correct it")
    return declared


def _first(*ids: int | None) -> int | None:
    return next((i for i in ids if i is not None), None)


def template(path: Path, post_processor: Any) -> tuple[int, ...]:
    """Return the tokens that a model file's post-processor, of the tokenizers library, puts before a text."""
    try:
        return () if post_processor is None else _template(json.loads(post_processor.__getstate__()))
    except KeyError as error:
        raise UserError(f"{path}: its post_processor adds {error}, which it does not describe; correct it") from error


def _template(described: Mapping[str, Any]) -> tuple[int, ...]:
    if described["type"] == "Sequence":
        return tuple(i for part in reversed(described["processors"]) for i in _template(part))
    if described["type"] in ("BertProcessing", "RobertaProcessing"):
        return (described["cls"][1],)
    before = itertools.takewhile(lambda part: "SpecialToken" in part, described.get("single", ()))
    names = (part["SpecialToken"]["id"] for part in before)
    return tuple(i for name in names for i in described["special_tokens"][name]["ids"])


def token_ids(path: Path, values: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a key, one or a list, that are in the vocabulary; others can never occur.

    Raises UserError where the value is not an id or a list of ids.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise UserError(f"{path}: {key}={json.dumps(value)[:80]}: must be a token id or a list of them; correct it")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _named(folder: Path, files: Mapping[str, Any], kind: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids of the first file that names any."""
    for name in (each for each in IDS if each in files):
        if ids := token_ids(folder / name, files[name], f"{kind}_token_id", vocabulary.size):
            return ids
    own = _by_name(files, f"{kind}_token", vocabulary)
    return () if own is None else (own,)


def _by_name(files: Mapping[str, Any], key: str, vocabulary: Vocabulary) -> int | None:
    for name in (each for each in NAMES if each in files):
        token = files[name].get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (found := vocabulary.find(text)) is not None:
            return found
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, an empty one where there is no file."""
    try:
        value = json.loads(read_limited(path, MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); correct it, or remove it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; correct it, or remove it")
    return value
