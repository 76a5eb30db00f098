"""Dry run of a training step without values: what any rank of any world computes, sends and holds."""
