"""Tokenizers: SentencePiece, a Hugging Face tokenizer.json, tiktoken, bytes, or characters.

The fingerprint, sha256 of the type and the model file, identifies the tokenizer that made a corpus.  The bytes of its
tokens give bits per byte, loss / ln 2 * tokens / bytes, which compares models with different tokenizers (Gao et al.
2020, arXiv:2101.00027, section 3.1).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers

from megatron3d.data.option_table import TOKENIZER_TYPES
from megatron3d.data.tokenizers.special_tokens import END_TOKENS, SpecialTokens, Vocabulary, declared_tokens, template
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import read_limited, shorten

MAX_BYTES = 1 << 30
MAX_VOCAB_SIZE = 1 << 24
MAX_TOKEN_LENGTH = 4096


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
    of a Unigram model it recurses once per byte of a token.  It allocates what a table of characters claims to hold.
    """
    text = content.decode("utf-8")
    described = json.loads(text, object_pairs_hook=_checked_fields)  # words may be written as \\u escapes in the text
    model = described["model"]
    if model.get("type") == "Unigram":
        longest = max((len(entry[0]) for entry in model["vocab"]), default=0)
        if longest > MAX_TOKEN_LENGTH:
            raise ValueError(f"a token has {longest} characters, more than {MAX_TOKEN_LENGTH}")
    if prefix := model.get("continuing_subword_prefix"):
        for merge in model.get("merges", ()):
            right = merge.split(" ")[-1] if isinstance(merge, str) else merge[1]
            if not right.startswith(prefix):
                raise ValueError(f"the merge {merge} goes on without the prefix {prefix!r}")
    return text


def _checked_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raises ValueError for a table of characters that is shorter than its first number says."""
    for name, value in pairs:
        if name == "precompiled_charsmap" and isinstance(value, str):
            table = base64.b64decode(value)
            size = int.from_bytes(table[:4], "little")
            if len(table) < 4 + size:
                raise ValueError(f"{name} has {len(table)} bytes, and {4 + size} by its first number")
    return dict(pairs)


@contextmanager
def library_errors(problem: str, remedy: str) -> Iterator[None]:
    """Raise UserError, with the reason, for whatever a library raises, also bare Exception and panics of Rust code."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        why = shorten(" ".join(str(error).split()) or type(error).__name__)
        raise UserError(f"data.tokenizer_model={problem} ({why}); {remedy}") from error


def reading(path: Path, tokenizer_type: str, wanted: str) -> AbstractContextManager[None]:
    """Return the context for reading a file, which may belong to another type."""
    problem = f"{path}: not {wanted}, which data.tokenizer_type={tokenizer_type} needs"
    return library_errors(problem, "name the file that belongs to this type, or the type that belongs to this file")


def using(path: Path, task: str) -> AbstractContextManager[None]:
    """Return the context for a task of a model that was read, and may be unable to do it."""
    remedy = "the file is damaged, or has no token for unknown text: make it again, or use another"
    return library_errors(f"{path}: cannot {task}", remedy)


ByteCounts = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Interface of a tokenizer; `eod` is the token that ends a document, None if there is no such token."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def special(self) -> SpecialTokens: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; raises UserError where the tokenizer cannot represent it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none."""
        ...

    def token_bytes(self) -> ByteCounts | None:
        """Return bytes of text by token id, 0 for special tokens; None where they depend on the token's neighbours."""
        ...


def _fingerprint(tokenizer_type: str, model: bytes) -> str:
    return hashlib.sha256(tokenizer_type.encode() + b"\0" + model).hexdigest()


def _piece_bytes(piece: str) -> int:
    return len(piece.replace("▁", " ").encode())


class SentencePieceTokenizer:
    """A SentencePiece model; `eod` is its end-of-sentence piece.

    SentencePiece stores a space as U+2581, so a text's own U+2581 is decoded as a space.
    """

    def __init__(self, tokenizer_model: str | None) -> None:
        path, model = read_model("SentencePieceTokenizer", tokenizer_model)
        self._path, self._model = path, sentencepiece.SentencePieceProcessor()
        with reading(path, "SentencePieceTokenizer", "a SentencePiece model"):
            self._model.LoadFromSerializedProto(model)
            if not self._model.vocab_size():
                raise ValueError("it has no pieces")
            self.vocab_size = int(self._model.vocab_size())
            bos, end = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))
            self.special = declared_tokens(path, Vocabulary(self.vocab_size, self._find, bos, end))
        self.eod = self.special.eod
        self.fingerprint = _fingerprint("SentencePieceTokenizer", model)

    def _find(self, piece: str) -> int | None:
        place = self._model.piece_to_id(piece.encode(errors="replace").decode())
        return place if self._model.id_to_piece(place) == piece else None

    def encode(self, text: str) -> list[int]:
        with using(self._path, "encode a text"):
            ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with using(self._path, "decode tokens"):
            return str(self._model.decode([int(token) for token in ids]))

    def token_bytes(self) -> ByteCounts:
        model = self._model

        def count(i: int) -> int:
            return 0 if model.is_control(i) else 1 if model.is_byte(i) else _piece_bytes(model.id_to_piece(i))

        with using(self._path, "say what its tokens are"):
            return np.array([count(i) for i in range(self.vocab_size)])


class HuggingFaceTokenizer:
    """A tokenizer.json, or a local folder with one; `eod` is declared next to it, or the first of END_TOKENS in it."""

    def __init__(self, tokenizer_model: str | None) -> None:
        path, model = read_model("HuggingFaceTokenizer", tokenizer_model)
        self._path = path
        with reading(path, "HuggingFaceTokenizer", "a tokenizer.json of Hugging Face tokenizers"):
            self._model = tokenizers.Tokenizer.from_str(tokenizer_json(model))
            self._model.no_truncation()  # a file may ask for both, for other uses
            self._model.no_padding()
            ids = self._model.get_vocab(with_added_tokens=True)
            if not ids:
                raise ValueError("it has no tokens")
            self.vocab_size = max(ids.values()) + 1
            end = next((ids[name] for name in END_TOKENS if name in ids), None)
            before = template(path, self._model.post_processor)
            self.special = declared_tokens(path, Vocabulary(self.vocab_size, ids.get, None, end, before))
        self.eod = self.special.eod
        self.fingerprint = _fingerprint("HuggingFaceTokenizer", model)

    def encode(self, text: str) -> list[int]:
        with using(self._path, "encode a text"):
            ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with using(self._path, "decode tokens"):
            return str(self._model.decode([int(token) for token in ids]))

    def token_bytes(self) -> ByteCounts | None:
        """Count bytes of each token: of byte-level BPE by characters, of byte fallback (<0x0A>) as in SentencePiece."""
        described = json.loads(self._model.to_str())
        decoder = described["decoder"] or {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        if "ByteLevel" not in kinds and "ByteFallback" not in kinds:
            return None
        added = {token["id"]: "" if token["special"] else token["content"] for token in described["added_tokens"]}
        counts = np.zeros(self.vocab_size, np.int64)
        for token, i in self._model.get_vocab(with_added_tokens=True).items():
            if i in added:
                counts[i] = len(added[i].encode())
            elif "ByteLevel" in kinds:
                counts[i] = len(token)
            else:
                is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
                counts[i] = 1 if is_byte else _piece_bytes(token)
        return counts


class TikTokenizer:
    """OpenAI's tiktoken, from a JSON file that names the file of ranks and adds the pattern and special tokens.

        {"ranks": "cl100k_base.tiktoken", "pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}

    `ranks` is a file in the same folder: a line per token, its bytes in base 64 and its id; every byte is a token.
    """

    _KEYS = ("ranks", "pattern", "special_tokens")

    def __init__(self, tokenizer_model: str | None) -> None:
        path, model = read_model("TikTokenizer", tokenizer_model)
        try:
            import tiktoken
        except ImportError as error:
            raise UserError("data.tokenizer_type=TikTokenizer: needs the package tiktoken; pip install it") from error
        self._path = path
        with reading(path, "TikTokenizer", f"a JSON object with {', '.join(self._KEYS)}"):
            values = json.loads(model)
            ranks_file, pattern, special = (values[key] for key in self._KEYS)
            if ranks_file != Path(ranks_file).name:
                raise ValueError("its ranks are not the name of a file in the same folder")
            _, ranks = read_model("TikTokenizer", str(path.parent / ranks_file))
            ids = parse_ranks(ranks, special)
            self._model = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ids, special_tokens=special)
        self._tokens = frozenset((*ids.values(), *special.values()))  # cl100k_base and others leave ids out
        self.vocab_size = int(self._model.max_token_value) + 1
        end = next((special[name] for name in END_TOKENS if name in special), None)
        self.special = SpecialTokens() if end is None else SpecialTokens(ends=(end,), prefix=end)
        self.eod = self.special.eod
        self.fingerprint = _fingerprint("TikTokenizer", model + b"\0" + ranks)

    def encode(self, text: str) -> list[int]:
        with using(self._path, "encode a text"):
            ids = self._model.encode_ordinary(text)
            if len(self._model.decode_bytes(ids)) != len(text.encode()):
                raise ValueError("its pattern leaves out part of the text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with using(self._path, "decode tokens"):
            return self._model.decode([int(token) for token in ids if token in self._tokens], errors="replace")

    def token_bytes(self) -> None:
        return None


class ByteTokenizer:
    """The 256 bytes of UTF-8, and one more token that ends a document."""

    vocab_size = 257
    eod: int | None = 256
    special = SpecialTokens(ends=(256,), prefix=256)
    fingerprint = _fingerprint("ByteTokenizer", b"")

    def __init__(self, tokenizer_model: str | None) -> None:
        if tokenizer_model is not None:
            raise UserError(f"data.tokenizer_model={tokenizer_model}: ByteTokenizer has no model file; remove it")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_bytes(self) -> ByteCounts:
        return np.array([1] * 256 + [0])


class CharTokenizer:
    """One token per character of a JSON list, as in nanoGPT; no token ends a document."""

    eod: int | None = None
    special = SpecialTokens()

    def __init__(self, tokenizer_model: str | None) -> None:
        path, model = read_model("CharTokenizer", tokenizer_model)
        with reading(path, "CharTokenizer", "a JSON list of different single characters"):
            characters = json.loads(model)
            if not _is_alphabet(characters):
                raise ValueError("it holds something else")
        self._path = path
        self._characters: list[str] = characters
        self._ids = {character: index for index, character in enumerate(characters)}
        self.vocab_size = len(characters)
        self.fingerprint = _fingerprint("CharTokenizer", model)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise UserError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {self.vocab_size} characters of "
                f"{self._path}; leave it out, or make them of all of the text: tools/train_tokenizer.py --type char"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        with using(self._path, "decode tokens"):
            return "".join(self._characters[token] for token in ids)

    def token_bytes(self) -> ByteCounts:
        return np.array([len(character.encode()) for character in self._characters])


def _is_alphabet(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    is_list = all(isinstance(item, str) and len(item) == 1 for item in value) and len(set(value)) == len(value)
    return is_list and not any("\ud800" <= item <= "\udfff" for item in value)  # halves of a pair are no characters


_TYPES: dict[str, Callable[[str | None], Tokenizer]] = {
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "TikTokenizer": TikTokenizer,
    "ByteTokenizer": ByteTokenizer,
    "CharTokenizer": CharTokenizer,
}
assert tuple(_TYPES) == TOKENIZER_TYPES, "option_table.py names the same types"


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """Build the tokenizer of a type and a model file; raises UserError where the file is not of this type."""
    if tokenizer_type not in _TYPES:
        raise UserError(f"data.tokenizer_type={tokenizer_type}: unknown; use {', '.join(TOKENIZER_TYPES)}")
    tokenizer = _TYPES[tokenizer_type](tokenizer_model)
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise UserError(
            f"data.tokenizer_model={tokenizer_model}: its largest id is {tokenizer.vocab_size - 1}, above "
            f"{MAX_VOCAB_SIZE - 1}; the file is damaged: make it again, or use another"
        )
    return tokenizer
