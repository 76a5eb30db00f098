"""Megatron's token files: read, written and published."""
