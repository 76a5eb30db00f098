"""Training: the state, one step, evaluation and the loop."""
