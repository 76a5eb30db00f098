"""What made a corpus: a small JSON file beside .bin and .idx, absent for files that Megatron wrote."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron3d.data.files import replacing, with_suffix
from megatron3d.errors import UserError

SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The tokenizer and the counts of a corpus."""

    tokenizer_type: str
    vocab_size: int
    fingerprint: str
    num_documents: int
    num_tokens: int
    max_token_id: int


def write_manifest(prefix: Path, manifest: Manifest) -> None:
    """Write it beside the token files."""
    with replacing(with_suffix(prefix, SUFFIX)) as file:
        file.write((json.dumps(asdict(manifest), indent=2) + "\n").encode())


def read_manifest(prefix: Path) -> Manifest | None:
    """The manifest of a corpus, None if there is none; raises UserError if it is damaged."""
    path = with_suffix(prefix, SUFFIX)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); make the corpus again") from error
    types = {name: str if name in ("tokenizer_type", "fingerprint") else int for name in Manifest.__annotations__}
    if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != types:
        raise UserError(f"{path}: must have exactly {', '.join(types)}; make the corpus again")
    return Manifest(**values)
