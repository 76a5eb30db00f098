"""Collectives by axis name over torch.distributed, optionally recorded."""
