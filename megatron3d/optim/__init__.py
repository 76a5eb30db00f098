"""Optimizers, learning-rate schedules, precision and the loss scale."""
