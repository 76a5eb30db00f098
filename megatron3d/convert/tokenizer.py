"""Convert tokenizer files between a run's folder and a Hugging Face folder, tested on texts before they are kept.

A SentencePiece model that encodes differently as a tokenizer.json is written under a name that transformers does not
take for a kind of model that it knows, which is reported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from pydantic import JsonValue

from megatron3d.config.schema import DataConfig
from megatron3d.convert.output_files import (
    BARE_PIECES,
    JSON,
    PIECES,
    folder_tokenizer,
    read_json,
    source_file,
    write_json,
)
from megatron3d.convert.tokenizer_candidates import candidates, encodes_alike, transformers_encodes_alike
from megatron3d.data.tokenizers.special_tokens import IDS, NAMES, SpecialTokens, token_ids
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError

_FILES = {"HuggingFaceTokenizer": JSON, "CharTokenizer": "characters.json", "TikTokenizer": "tiktoken.json"}
GENERATION, SETTINGS = IDS[0], NAMES[0]
# Files that are copied with a tokenizer; the first describe it by its class in transformers.
_OF_CLASS = (*NAMES, "added_tokens.json", "vocab.json", "merges.txt")
COMPANIONS = (*_OF_CLASS, "chat_template.jinja", GENERATION)
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of tokenizer_config.json that hold for a converted tokenizer too.
_KEPT = ("bos_token", "pad_token", "chat_template", "padding_side", "truncation_side", "model_max_length")


def import_tokenizer(
    source: Path, target: Path, tokenizer_type: str | None, tokenizer_model: str | None
) -> tuple[Tokenizer, str, str | None]:
    """Copy a folder's or the named tokenizer; return the tokenizer, its type, and the name of its file in `target`."""
    if tokenizer_type is None:
        for name in (*IDS, *COMPANIONS):  # of which none may be a link that leads out
            source_file(source, name)
        found = folder_tokenizer(source)
        if found is None:
            raise UserError(
                f"{source}: there is neither {JSON} nor {PIECES}; name the model's tokenizer with --tokenizer-type and "
                "--tokenizer-model, or make them with save_pretrained of transformers' fast tokenizer"
            )
        tokenizer_type, tokenizer_model = found
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model)
    if tokenizer_model is None:
        return tokenizer, tokenizer_type, None
    path = Path(tokenizer_model) / JSON if Path(tokenizer_model).is_dir() else Path(tokenizer_model)
    pieces = BARE_PIECES if path.name == BARE_PIECES else PIECES
    name = _FILES.get(tokenizer_type, pieces)
    shutil.copyfile(path, target / name)
    if tokenizer_type == "TikTokenizer":
        ranks = str(read_json(path)["ranks"])  # a file in the same folder
        shutil.copyfile(path.parent / ranks, target / ranks)
    copy_companions(path.parent, target)
    return tokenizer, tokenizer_type, name


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files that say how a tokenizer is used."""
    for name in COMPANIONS:
        if (path := source_file(source, name)).is_file():
            shutil.copyfile(path, target / name)


def keep_token_ids(settings: Mapping[str, Any], source: Path, target: Path, vocab_size: int) -> list[str]:
    """Add the token ids of config.json to the target's generation_config.json where that names none.

    Returns a sentence for each value with an id outside of the vocabulary, which can never occur.
    """
    path = target / GENERATION
    held = read_json(path) if path.is_file() else {}
    new: dict[str, JsonValue] = {}
    notes = []
    for key in ID_KEYS:
        stated, ids = settings.get(key), token_ids(source / "config.json", settings, key, vocab_size)
        if ids and held.get(key) is None:
            new[key] = id_value(ids)
        if stated is not None and set(ids) != set(stated if isinstance(stated, list) else [stated]):
            notes.append(f"config.json: {key}={json.dumps(stated)}: not in the tokenizer's vocabulary of {vocab_size}")
    if new:
        write_json(path, held | new)
    return notes


def id_value(ids: Sequence[int]) -> JsonValue:
    """Return token ids as config.json has them: null, a number or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else [*ids]


def export_tokenizer(
    data: DataConfig, target: Path, max_positions: int, with_transformers: bool = True
) -> tuple[Tokenizer, list[str]]:
    """Write the tokenizer's files; return the tokenizer, and a sentence for each that could not be written.

    Args:
        with_transformers: also require that transformers, where it is installed, encodes alike from the files.
    """
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model)
    path = Path(data.tokenizer_model or "")
    if data.tokenizer_type == "HuggingFaceTokenizer":
        return tokenizer, _copy(path / JSON if path.is_dir() else path, tokenizer, data, target, max_positions)
    if path.name == PIECES:
        copy_companions(path.parent, target)
    stated = read_json(target / SETTINGS) if (target / SETTINGS).exists() else {}
    for name in _OF_CLASS:  # which is another one
        (target / name).unlink(missing_ok=True)
    begin = tokenizer.special.before_text(data.add_bos_token)
    found, texts = candidates(data)
    for made in found:
        if encodes_alike(tokenizer, made, texts):
            _add_template(made, begin)
            made.save(str(target / JSON))
            write_json(target / SETTINGS, _settings(made, tokenizer.special, begin, max_positions, stated))
            if not with_transformers or transformers_encodes_alike(tokenizer, begin, target, texts):
                if data.tokenizer_type == "SentencePieceTokenizer":
                    shutil.copyfile(path, target / PIECES)
                return tokenizer, []
    for name in (JSON, SETTINGS):
        (target / name).unlink(missing_ok=True)
    note = f"{data.tokenizer_type} has no {JSON} that encodes alike; none was written"
    if data.tokenizer_type != "SentencePieceTokenizer":
        return tokenizer, [note]
    shutil.copyfile(path, target / BARE_PIECES)
    return tokenizer, [f"{note}; {BARE_PIECES} is for the sentencepiece package, not for transformers"]


def _copy(path: Path, tokenizer: Tokenizer, data: DataConfig, target: Path, max_positions: int) -> list[str]:
    """Copy a tokenizer.json with the files next to it; return notes."""
    shutil.copyfile(path, target / JSON)
    if path.name == JSON:
        copy_companions(path.parent, target)
    special = tokenizer.special
    if not (target / SETTINGS).exists():
        made = tokenizers.Tokenizer.from_file(str(path))
        write_json(target / SETTINGS, _settings(made, special, special.prepended, max_positions, {}))
    if special.before_text(data.add_bos_token) == special.prepended:
        return []
    asked = json.dumps(data.add_bos_token)
    return [f"data.add_bos_token={asked}: {JSON} declares otherwise, and is copied as it is"]


def _add_template(made: tokenizers.Tokenizer, begin: Sequence[int]) -> None:
    """Put tokens before every text, by the post-processor of the tokenizers library."""
    if begin:
        names = [made.id_to_token(i) for i in begin]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*names, "$A"], pair=[*names, "$A", "$B"], special_tokens=list(zip(names, begin, strict=True))
        )


def _settings(
    made: tokenizers.Tokenizer,
    special: SpecialTokens,
    begin: Sequence[int],
    max_positions: int,
    stated: Mapping[str, JsonValue],
) -> dict[str, JsonValue]:
    """Return tokenizer_config.json; `stated` is that of the tokenizer's source."""
    settings: dict[str, JsonValue] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(begin),
    }
    if begin:
        settings["bos_token"] = made.id_to_token(begin[0])
    if special.eod is not None:
        settings["eos_token"] = made.id_to_token(special.eod)
    return settings | {key: stated[key] for key in _KEPT if key in stated}
