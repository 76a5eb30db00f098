"""The output folder of a conversion, and JSON files in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from megatron3d.errors import UserError
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


def read_json(path: Path) -> dict[str, JsonValue]:
    """Return the JSON object of a file; raises UserError where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a folder that save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; copy or download it again")
    return value


def write_json(path: Path, value: object) -> None:
    """Write a JSON file with indentation."""
    write_text(path, json.dumps(value, indent=2) + "\n")
