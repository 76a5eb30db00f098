"""Dry run of a training step without values: computation, communication and memory of any rank of any world."""
