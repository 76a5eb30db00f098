"""Predict the time of a training step: kernel rooflines, network links, a simulated pipeline."""
