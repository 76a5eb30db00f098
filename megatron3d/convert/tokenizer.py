"""Convert tokenizer files between a run's folder and a Hugging Face folder, tested on a text before they are written.

SentencePiece's pieces become the Unigram or BPE model of the tokenizers library, bytes its byte-level alphabet,
characters its word-level vocabulary; a conversion that encodes differently is not written, which is reported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron3d.config.io_schema import DataConfig
from megatron3d.convert.output_files import write_json
from megatron3d.data.preprocess.tokenizer_training import END_OF_DOCUMENT
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, build_tokenizer
from megatron3d.errors import UserError

JSON, PIECES = "tokenizer.json", "tokenizer.model"
CHARACTERS = "characters.json"
# Files that are copied with a tokenizer.json.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
SAMPLE = (
    "The quick brown fox, 1234567890 times;  two spaces,\ta tab\nand a new line.\n\n"
    "    if x_1 != 'ä': return \"漢字 😀\"\n"
    "Ünïcödé – naïve façade … ½ ≤ ∑; http://example.org/?q=a+b&c=%20 <b>bold</b> e=mc²\r\n"
)
_SPACE = "▁"


def import_tokenizer(
    source: Path, target: Path, tokenizer_type: str | None, tokenizer_model: str | None
) -> tuple[Tokenizer, str, str | None]:
    """Copy a folder's or the named tokenizer; return the tokenizer, its type, and the name of its file in `target`."""
    if tokenizer_type is None:
        files = {"HuggingFaceTokenizer": source / JSON, "SentencePieceTokenizer": source / PIECES}
        tokenizer_type = next((kind for kind, path in files.items() if path.is_file()), None)
        if tokenizer_type is None:
            raise UserError(
                f"{source}: there is neither {JSON} nor {PIECES}; name the model's tokenizer with --tokenizer-type and "
                "--tokenizer-model, or make them with save_pretrained of transformers' fast tokenizer"
            )
        tokenizer_model = str(files[tokenizer_type])
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model)
    if tokenizer_model is None:
        return tokenizer, tokenizer_type, None
    path = Path(tokenizer_model) / JSON if Path(tokenizer_model).is_dir() else Path(tokenizer_model)
    name = {"HuggingFaceTokenizer": JSON, "CharTokenizer": CHARACTERS}.get(tokenizer_type, PIECES)
    shutil.copyfile(path, target / name)
    copy_companions(path.parent, target)
    return tokenizer, tokenizer_type, name


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files that say how a tokenizer.json is used."""
    for name in (*COMPANIONS, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def export_tokenizer(data: DataConfig, target: Path, max_positions: int) -> tuple[Tokenizer, list[str]]:
    """Write the tokenizer's files; return the tokenizer, and a sentence for each that could not be written."""
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model)
    if data.tokenizer_type == "HuggingFaceTokenizer":
        assert data.tokenizer_model is not None, "a tokenizer that was read has a file"
        path = Path(data.tokenizer_model)
        path = path / JSON if path.is_dir() else path
        shutil.copyfile(path, target / JSON)
        copy_companions(path.parent, target)
        converted = tokenizers.Tokenizer.from_file(str(path))
    else:
        if data.tokenizer_type == "SentencePieceTokenizer":
            shutil.copyfile(str(data.tokenizer_model), target / PIECES)
        found = next((made for made in _conversions(data) if _agree(tokenizer, made)), None)
        if found is None:
            return tokenizer, [f"{data.tokenizer_type} has no {JSON} that encodes alike; none was written"]
        found.save(str(target / JSON))
        converted = found
    if not (target / COMPANIONS[0]).exists():
        end = None if tokenizer.eod is None else converted.id_to_token(tokenizer.eod)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
        } | ({"eos_token": end} if end else {})
        write_json(target / COMPANIONS[0], settings)
    return tokenizer, []


def _agree(ours: Tokenizer, theirs: tokenizers.Tokenizer) -> bool:
    """Return whether both encode the sample alike, and decode it to the same text."""
    text = ours.decode(range(ours.vocab_size)) if isinstance(ours, CharTokenizer) else SAMPLE
    ids = ours.encode(text)
    return bool(theirs.encode(text, add_special_tokens=False).ids == ids and theirs.decode(ids) == ours.decode(ids))


def _conversions(data: DataConfig) -> Iterator[tokenizers.Tokenizer]:
    """Yield candidates for an equal tokenizer, likeliest first; none for a type without a counterpart."""
    yield from _CONVERSIONS.get(data.tokenizer_type, lambda _: iter(()))(data.tokenizer_model)


def _bytes(_: str | None) -> Iterator[tokenizers.Tokenizer]:
    """Yield the byte-level model whose token of each byte is the byte's number, as in our tokenizer."""
    alphabet = {_byte_name(byte): byte for byte in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT])
    assert made.token_to_id(END_OF_DOCUMENT) == ByteTokenizer.eod, "the end of a document follows the bytes"
    yield made


def _byte_name(byte: int) -> str:
    """Return the character of a byte in byte-level models (Radford et al. 2019): itself, or one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


def _characters(path: str | None) -> Iterator[tokenizers.Tokenizer]:
    characters = json.loads(Path(str(path)).read_bytes())
    made = tokenizers.Tokenizer(models.WordLevel({c: place for place, c in enumerate(characters)}, unk_token=None))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(?m:[\s\S])"), "isolated")
    made.decoder = decoders.Fuse()
    yield made


def _pieces(path: str | None) -> Iterator[tokenizers.Tokenizer]:
    """Yield the pieces as a Unigram and as a BPE model, with a space before the text if SentencePiece adds one."""
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    scored = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.vocab_size())]
    falls_back = any(model.is_byte(i) for i in range(model.vocab_size()))
    has_prefix = model.encode("a", out_type=str)[0].startswith(_SPACE)
    special = [piece for i, (piece, _) in enumerate(scored) if model.is_control(i)]
    unigram = models.Unigram(scored, unk_id=model.unk_id(), byte_fallback=falls_back)
    unknown, vocab = model.id_to_piece(model.unk_id()), {piece: i for i, (piece, _) in enumerate(scored)}
    bpe = models.BPE(vocab, _merges(scored), unk_token=unknown, fuse_unk=True, byte_fallback=falls_back)
    for core in (unigram, bpe):
        made = tokenizers.Tokenizer(core)
        steps = [normalizers.Prepend(_SPACE)] if has_prefix else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        made.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        made.add_special_tokens(special)
        yield made


def _merges(scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces, those of the best pieces first, SentencePiece's merge order."""
    ids = {piece: i for i, (piece, _) in enumerate(scored)}
    splits = []
    for piece, score in scored:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        splits += [(-score, place, left, right) for place, (_, _, left, right) in enumerate(known)]
    return [(left, right) for _, _, left, right in sorted(splits, key=lambda split: split[:2])]


_CONVERSIONS: Mapping[str, Callable[[str | None], Iterator[tokenizers.Tokenizer]]] = {
    "ByteTokenizer": _bytes,
    "CharTokenizer": _characters,
    "SentencePieceTokenizer": _pieces,
}
