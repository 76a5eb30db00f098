"""Observation of a training run: timing, memory, tensor statistics, traces, and comparison with predictions."""
