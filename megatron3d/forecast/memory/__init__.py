"""Predict the memory of a rank in closed form, from the RunSpec alone."""
