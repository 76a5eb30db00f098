"""A training step without values: what it computes, sends and holds on any rank of any world."""
