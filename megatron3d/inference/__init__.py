"""Use a trained model: load, sample, score, answer an evaluation harness."""
