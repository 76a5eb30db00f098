"""From text to token files, and tokenizers trained on text."""
