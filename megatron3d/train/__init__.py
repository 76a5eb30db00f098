"""Training: state, step, loop, evaluation, checkpointing and rollback."""
