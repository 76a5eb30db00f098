"""Metrics of a run: the record of a step, the console, metrics.jsonl, tensorboard and wandb."""

from megatron3d.metrics.step_record import ProcessMemory, StepRecord, process_memory
from megatron3d.metrics.writer import MetricsWriter

__all__ = ["MetricsWriter", "ProcessMemory", "StepRecord", "process_memory"]
