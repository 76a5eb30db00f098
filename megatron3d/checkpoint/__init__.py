"""Checkpoints of logical tensors, which know nothing of the layout that wrote them."""
