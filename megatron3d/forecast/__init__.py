"""Predict time and memory before a run, and choose its layout."""
