"""megatron3d: GPT pretraining where every parallel layout computes the same numbers."""

__version__ = "0.1.0"
