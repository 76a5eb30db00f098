"""The tokenizer's file in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron3d.convert.output_files import source_file

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
