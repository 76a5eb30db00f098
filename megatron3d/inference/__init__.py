"""Inference with a trained model: loading, sampling, scoring, and an adapter to lm-evaluation-harness."""
