"""The model file of a tokenizer: read, and named in the error where a tokenizer library fails because of it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.limits import read_limited, shorten

MAX_BYTES = 1 << 30
MAX_VOCAB_SIZE = 1 << 24
MAX_TOKEN_LENGTH = 4096
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


def read_model(tokenizer_type: str, tokenizer_model: str | None) -> tuple[Path, bytes]:
    """Return the path and the content of a model file; raises UserError where there is none."""
    if tokenizer_model is None:
        raise UserError(
            f"data.tokenizer_model: {tokenizer_type} needs a model file; "
            "name one, or set data.tokenizer_type=ByteTokenizer, which needs none"
        )
    path = Path(tokenizer_model)
    try:
        if tokenizer_type == "HuggingFaceTokenizer" and path.is_dir():
            path = path / "tokenizer.json"
        return path, read_limited(path, MAX_BYTES)
    except OSError as error:
        raise UserError(
            f"data.tokenizer_model={tokenizer_model}: cannot read {path} ({error.strerror}); "
            "tools/train_tokenizer.py makes a tokenizer model"
        ) from error


def parse_ranks(content: bytes, special: Mapping[str, int]) -> dict[bytes, int]:
    """Return the ids of tiktoken's tokens; raises ValueError unless each is there once, and every byte is a token."""
    lines = [line.split() for line in content.splitlines()]
    ids = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    distinct = {*ids.values(), *special.values()}
    if len(ids) < len(lines) or len(distinct) < len(lines) + len(special):
        raise ValueError("a token or a rank is there twice")
    if not 0 <= min(distinct) <= max(distinct) < MAX_VOCAB_SIZE:
        raise ValueError(f"ranks must be from 0 to {MAX_VOCAB_SIZE - 1}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ids]:
        raise ValueError(f"byte {missing[0]} is no token")
    return ids


def tokenizer_json(content: bytes) -> str:
    """Return the text of a tokenizer.json; raises ValueError where Hugging Face's library would end the process.

    It aborts on bytes that are not UTF-8, and where it cuts the prefix of a merge out of a character.  To free the trie
    of a Unigram model it recurses once per byte of a token.
    """
    text = content.decode("utf-8")
    if '"Unigram"' in text:
        longest = max((len(entry[0]) for entry in json.loads(text)["model"]["vocab"]), default=0)
        if longest > MAX_TOKEN_LENGTH:
            raise ValueError(f"a token has {longest} characters, more than {MAX_TOKEN_LENGTH}")
    if _PREFIX.search(text):
        model = json.loads(text)["model"]
        prefix = model["continuing_subword_prefix"]
        for merge in model.get("merges", ()):
            right = merge.split(" ")[-1] if isinstance(merge, str) else merge[1]
            if not right.startswith(prefix):
                raise ValueError(f"the merge {merge} goes on without the prefix {prefix!r}")
    return text


def not_of_type(path: Path, tokenizer_type: str, wanted: str) -> Callable[[str], UserError]:
    """Return the maker of the error of a file that does not belong to the type, from the reason."""
    return lambda why: UserError(
        f"data.tokenizer_model={path}: not {wanted}, which data.tokenizer_type={tokenizer_type} needs ({why}); "
        "name the file that belongs to this type, or the type that belongs to this file"
    )


def unable(path: Path, task: str) -> Callable[[str], UserError]:
    """Return the maker of the error of a model that was read and cannot do its task, from the reason."""
    return lambda why: UserError(
        f"data.tokenizer_model={path}: cannot {task} ({why}); "
        "the file is damaged, or has no token for unknown text: make it again, or use another"
    )


@contextmanager
def library_errors(make_error: Callable[[str], UserError]) -> Iterator[None]:
    """Raise `make_error(reason)` for whatever a library raises, also bare Exception and the panics of Rust code."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise make_error(shorten(" ".join(str(error).split()) or type(error).__name__)) from error
