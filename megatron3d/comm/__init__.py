"""Collectives by axis name over torch.distributed, recorded where wanted."""
