"""The output folder of a conversion, and JSON files in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from megatron3d.data.tokenizers.special_tokens import MAX_BYTES
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import read_limited
from megatron3d.runtime.files import new_folder, write_text


@contextmanager
def output_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` when the block succeeds; raises UserError where `target` exists."""
    if target.exists():
        raise UserError(f"--output {target}: exists already; name a new folder, or remove it")
    try:
        with new_folder(target) as folder:
            yield folder
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--output {target}: cannot be written: {reason}; use a folder that you own, on a disk with room"
        ) from error


def source_file(folder: Path, name: str) -> Path:
    """Return a file of a Hugging Face folder, whether or not it is there.

    Raises UserError where it is no regular file, or a link that leads out of the folder; links of the hub's cache,
    which lead from `snapshots/REVISION` to `blobs`, are followed.
    """
    path, root = folder / name, Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(home) for home in homes):
        raise UserError(f"{path}: is a link to {real}, outside of the folder; copy that file here if it belongs here")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; give a folder that save_pretrained wrote")
    return path


def read_json(path: Path) -> dict[str, JsonValue]:
    """Return the JSON object of a file; raises UserError where there is none."""
    try:
        value = json.loads(read_limited(path, MAX_BYTES))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a folder that save_pretrained wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; copy or download it again")
    return value


def write_json(path: Path, value: object) -> None:
    """Write a JSON file with indentation."""
    write_text(path, json.dumps(value, indent=2) + "\n")


JSON, PIECES = "tokenizer.json", "tokenizer.model"
# A SentencePiece model that no tokenizer.json equals; transformers would read PIECES as Llama's kind of model.
BARE_PIECES = "sentencepiece.model"
_KINDS = {JSON: "HuggingFaceTokenizer", PIECES: "SentencePieceTokenizer", BARE_PIECES: "SentencePieceTokenizer"}


def folder_tokenizer(folder: Path) -> tuple[str, str] | None:
    """Return type and file of a folder's tokenizer, None where there is none; raises UserError for links out of it."""
    for name, kind in _KINDS.items():
        if (path := source_file(folder, name)).is_file():
            return kind, str(path)
    return None
