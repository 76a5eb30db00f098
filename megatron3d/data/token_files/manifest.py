"""How a corpus was made: a JSON file next to .bin and .idx, absent for token files that Megatron wrote."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron3d.data.token_files.files import replace_output, with_suffix
from megatron3d.errors import UserError

SUFFIX = ".manifest.json"


class Manifest(BaseModel):
    """The tokenizer, the counts and the checksums of a corpus.

    Attributes:
        bin_sha256: of the token file, None in corpora older than checksums; `idx_sha256` likewise.
        job: identifies the job that a shard belongs to; None for a whole corpus.
        part: which shard it is, such as "2/3".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tokenizer_type: str
    vocab_size: int
    fingerprint: str
    num_documents: int
    num_tokens: int
    max_token_id: int
    bin_sha256: str | None = None
    idx_sha256: str | None = None
    job: str | None = None
    part: str | None = None


def write_manifest(prefix: Path, manifest: Manifest | None) -> None:
    """Write the manifest of a corpus, or for None delete an older one."""
    if manifest is None:
        with_suffix(prefix, SUFFIX).unlink(missing_ok=True)
        return
    with replace_output(with_suffix(prefix, SUFFIX)) as file:
        file.write((json.dumps(manifest.model_dump(exclude_none=True), indent=2) + "\n").encode())


def read_manifest(prefix: Path) -> Manifest | None:
    """Return the manifest of a corpus, None if there is none; raises UserError if it is damaged."""
    path = with_suffix(prefix, SUFFIX)
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: damaged ({details}); make the corpus again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make the corpus again") from error
