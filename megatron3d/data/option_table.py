"""Values of the options of data tools and conversion, which a parser shows before libraries are imported."""

from __future__ import annotations

TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer")
# Distinguishes the name of a dataset from the prefix of token files.
HF_PREFIX = "hf:"
# Key of a line, or column of a row, that holds the text of a document.
TEXT_KEY = "text"
