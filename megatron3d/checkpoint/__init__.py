"""Checkpoints of logical tensors, independent of the layout that wrote them."""
