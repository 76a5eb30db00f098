"""Checkpoints to and from Hugging Face folders: config.json, safetensors shards and tokenizer files."""
