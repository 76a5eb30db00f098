"""Convert tokenizer files between a run's folder and a Hugging Face folder, tested on texts before they are kept.

Bytes become the byte-level model of Hugging Face's library, characters its word-level one, and SentencePiece's pieces
its Unigram or BPE model with the same normalization, pieces and order of merges.  The converters of transformers, and
the library's own, are not used: they find the user's symbols and the names of bytes in texts where SentencePiece does
not, and transformers need not be installed.  A SentencePiece model that encodes differently as a tokenizer.json is
written under a name that transformers does not take for a kind of model that it knows, which is reported.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from google.protobuf.message import DecodeError
from pydantic import JsonValue
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron3d.config.schema import DataConfig
from megatron3d.convert.compare import has_transformers
from megatron3d.convert.hub_weights import (
    BARE_PIECES,
    JSON,
    PIECES,
    folder_tokenizer,
    read_json,
    source_file,
    write_json,
)
from megatron3d.data.preprocess.tokenizer_training import END_OF_DOCUMENT
from megatron3d.data.tokenizers.special_tokens import IDS, NAMES, SpecialTokens, token_ids
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from megatron3d.errors import UserError

_FILES = {"HuggingFaceTokenizer": JSON, "CharTokenizer": "characters.json", "TikTokenizer": "tiktoken.json"}
GENERATION, SETTINGS = IDS[0], NAMES[0]
# Files that are copied with a tokenizer; the first describe it by its class in transformers.
_OF_CLASS = (*NAMES, "added_tokens.json", "vocab.json", "merges.txt")
COMPANIONS = (*_OF_CLASS, "chat_template.jinja", GENERATION)
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of tokenizer_config.json that hold for a converted tokenizer too.
_KEPT = ("bos_token", "pad_token", "unk_token", "chat_template", "padding_side", "truncation_side", "model_max_length")


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


SPACE = "▁"
# Types of pieces in a model file.
_NORMAL, _UNKNOWN, CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Score of pieces that text never becomes, in a model of the library that knows no types.
_NEVER = -1e6


def of_type(model: Any, kind: int) -> list[str]:
    """Return the pieces of a type."""
    return [each.piece for each in model.pieces if each.type == kind]


def surfaces(model: Any) -> list[str]:
    """Return the texts of pieces that occur in texts."""
    return [each.piece.replace(SPACE, " ") for each in model.pieces if each.type != CONTROL]


def piece_tokenizers(model: Any) -> Iterator[tokenizers.Tokenizer]:
    """Yield a Unigram and a BPE model of the pieces; a caller finds out which one encodes alike."""
    unknown = next(i for i, each in enumerate(model.pieces) if each.type == _UNKNOWN)
    falls_back = bool(of_type(model, _BYTE))
    scored = [(each.piece, each.score if each.type in (_NORMAL, _USER_DEFINED) else _NEVER) for each in model.pieces]
    yield _tokenizer(model, models.Unigram(scored, unk_id=unknown, byte_fallback=falls_back))
    bpe = models.BPE(
        {piece: i for i, (piece, _) in enumerate(scored)},
        _merges([(each.piece, each.score) for each in model.pieces if each.type == _NORMAL]),
        unk_token=scored[unknown][0],
        fuse_unk=True,
        byte_fallback=falls_back,
        ignore_merges=bool(of_type(model, _USER_DEFINED)),
    )
    yield _tokenizer(model, bpe)


def _tokenizer(model: Any, encoder: models.Model) -> tokenizers.Tokenizer:
    rules = model.normalizer_spec
    made = tokenizers.Tokenizer(encoder)
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +|[ ▁]+\z| +(?= )"), ""))
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if splits := list(_splits(model, isinstance(encoder, models.BPE))):
        made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens(of_type(model, CONTROL))
    return made


def _splits(model: Any, is_bpe: bool) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yield the splits of a text before its parts are encoded.

    SentencePiece takes the user's symbols out of a text first, the longest one at each place.  The library's Unigram
    model knows no types of pieces, and would find the names of bytes in texts, unless their last characters stand
    apart; its BPE model looks up whole words where that finds the user's symbols, and would find such names there.
    """
    symbols = sorted(of_type(model, _USER_DEFINED), key=len, reverse=True)
    names = [each.piece for each in model.pieces if each.type in (_UNKNOWN, _BYTE)]
    last = _escaped("".join(sorted({name[-1] for name in names})))
    if symbols:
        yield pre_tokenizers.Split(tokenizers.Regex(_either(symbols)), "isolated")
    if not is_bpe:
        yield pre_tokenizers.Split(tokenizers.Regex(rf"[{last}](?<={_either(names)})"), "merged_with_next")
    elif symbols:
        whole = rf"[{last}](?<=\A(?:{_either(names)}))\z"
        yield pre_tokenizers.Split(tokenizers.Regex(whole), "merged_with_next")


def _either(texts: Iterable[str]) -> str:
    """Return a pattern of any of the texts."""
    return "|".join(map(_escaped, texts))


def _escaped(text: str) -> str:
    return re.sub(r"(\W)", r"\\\1", text)


def _merges(scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces, those of the best pieces first, SentencePiece's merge order."""
    ids = {piece: i for i, (piece, _) in enumerate(scored)}
    splits = []
    for piece, score in scored:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        splits += [(-score, place, left, right) for place, (_, _, left, right) in enumerate(known)]
    return [(left, right) for _, _, left, right in sorted(splits, key=lambda split: split[:2])]


SAMPLE = (
    "The quick brown fox, 1234567890 times;  two spaces,\ta tab\nand a new line.\n\n"
    "    if x_1 != 'ä': return \"漢字 😀\"\n"
    "Ünïcödé – naïve façade … ½ ≤ ∑; http://example.org/?q=a+b&c=%20 <b>bold</b> e=mc²\r\n"
)
# Spaces at the ends, what Unicode normalization changes, control characters, the name of a byte.
ODD = ("", " ", "  a  b  ", "\n a", "½ﬁÅ Å Ⅳ ａｂｃ　ｄ", "a\u200bb\u00a0c", "\x01\x02", "a\u0301", "<0x0A>", "▁a▁▁")
NUM_RANDOM_TEXTS, MAX_SURFACES = 300, 20


def open_texts(surfaces: Sequence[str], specials: Sequence[str]) -> list[str]:
    """Return texts of all surfaces of tokens, in order and in random orders, and texts that need care.

    Texts with the name of a special token are left out: the tokenizers library recognizes it there, and ours do not.
    """
    rows = [surfaces[start : start + MAX_SURFACES] for start in range(0, len(surfaces), MAX_SURFACES)]
    texts = [joint.join(row) for row in rows for joint in (" ", "")]
    texts += [SAMPLE, *SAMPLE.splitlines(), *ODD, *_random_texts([*surfaces, " ", "  ", "\n", "\t", "é", "漢", "x"])]
    return [text for text in texts if not any(special in text for special in specials)]


def _random_texts(surfaces: Sequence[str]) -> list[str]:
    rng = random.Random(1234)
    return ["".join(rng.choices(surfaces, k=rng.randint(1, MAX_SURFACES))) for _ in range(NUM_RANDOM_TEXTS)]


def encodes_alike(ours: Tokenizer, theirs: tokenizers.Tokenizer, texts: Sequence[str]) -> bool:
    """Return whether both encode the texts alike, and decode them to the same text if they represent all of it."""
    unknown = theirs.token_to_id(getattr(theirs.model, "unk_token", None) or "<unk>")
    for text in texts:
        ids = ours.encode(text)
        if theirs.encode(text, add_special_tokens=False).ids != ids:
            return False
        is_whole = unknown not in ids and SPACE not in text  # SentencePiece decodes its own sign of a space as a space
        if is_whole and theirs.decode(ids) != ours.decode(ids):
            return False
    return True


def transformers_encodes_alike(ours: Tokenizer, begin: Sequence[int], folder: Path, texts: Sequence[str]) -> bool:
    """Return whether transformers, if it is installed, encodes the texts alike from the files of a folder.

    Texts with the name of the unknown token are left out: it recognizes that there, as it does all special tokens.
    """
    if not has_transformers():
        return True
    import transformers

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # of any kind, where a setting that was kept is one that it does not take
        return False
    plain = (text for text in texts if not theirs.unk_token or theirs.unk_token not in text)
    return all(theirs(text, verbose=False).input_ids == [*begin, *ours.encode(text)] for text in plain)


def candidates(data: DataConfig) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    """Return the tokenizers that may equal the configured one, and texts to compare them on; none for another type."""
    find = _CANDIDATES.get(data.tokenizer_type)
    return (iter(()), []) if find is None else find(Path(data.tokenizer_model or ""))


def _bytes(_: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    """Return the byte-level model whose token of each byte is the byte's number, as in our tokenizer."""
    # A byte's name in byte-level models (Radford et al. 2019) is its character, or, in order, one above 255.
    names = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(name for name in names if ord(name) > 255))
    alphabet = {chr(byte) if chr(byte) in names else next(others): byte for byte in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT])
    assert made.token_to_id(END_OF_DOCUMENT) == ByteTokenizer.eod, "the end of a document follows the bytes"
    return iter([made]), open_texts([chr(code) for code in range(256)], [END_OF_DOCUMENT])


def _characters(path: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    characters = json.loads(path.read_bytes())
    made = tokenizers.Tokenizer(models.WordLevel({c: place for place, c in enumerate(characters)}, unk_token=None))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(?m:[\s\S])"), "isolated")
    made.decoder = decoders.Fuse()
    return iter([made]), ["".join(characters), *_random_texts(characters)]


def _pieces(path: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    try:
        model = ModelProto.FromString(path.read_bytes())
        texts = open_texts(surfaces(model), of_type(model, CONTROL))
    except (DecodeError, ValueError):  # SentencePiece reads pieces that are not UTF-8
        return iter(()), []
    return piece_tokenizers(model), texts


_CANDIDATES: Mapping[str, Callable[[Path], tuple[Iterator[tokenizers.Tokenizer], list[str]]]] = {
    "ByteTokenizer": _bytes,
    "CharTokenizer": _characters,
    "SentencePieceTokenizer": _pieces,
}
