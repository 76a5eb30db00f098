"""Meshes, layouts and matmul plans: what is split over which ranks, as values without torch."""
