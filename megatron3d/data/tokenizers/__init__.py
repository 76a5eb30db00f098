"""Tokenizers, and how many bytes their tokens stand for."""
