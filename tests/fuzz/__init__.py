"""Fuzzers of every file format: a damaged or hostile file is refused, or read as what it was."""
