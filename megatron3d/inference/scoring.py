"""Log probabilities of texts after their contexts, in any layout, with the logits of `CHUNK` positions at once.

log p(continuation | context)  =  sum over tokens of the continuation of log p(token | all tokens before it)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron3d.inference.sampling import Context, pad_tokens
from megatron3d.ops.kv_cache import KVCache
from megatron3d.pipeline.executor import PipelineExecutor

CHUNK = 64
"""Positions whose logits exist at once."""


@dataclass(frozen=True)
class Score:
    """Log probability of a continuation in nats, and whether greedy decoding generates it."""

    log_prob: float
    is_greedy: bool


@dataclass(frozen=True)
class _Row:
    """Input tokens of one row, their next-token labels, and the number of final labels that are scored."""

    inputs: list[int]
    labels: list[int]
    num_scored: int

    def counts(self, start: int, stop: int) -> range:
        """Return the scored positions between `start` and `stop`."""
        return range(max(start, len(self.labels) - self.num_scored), min(stop, len(self.labels)))


def score(executor: PipelineExecutor, pairs: Sequence[tuple[Context, Context]], device: torch.device) -> list[Score]:
    """Return the score of each (context, continuation), the same on every rank; all ranks must make the same call.

    If both are longer than the model's context, the first tokens are dropped; neither may be empty, and a continuation
    must fit into the model.
    """
    model = executor.model
    rows = [_row(context, continuation, model.arch.seq_length) for context, continuation in pairs]
    cache, width = KVCache(model.arch.seq_length, forgets=True), max(len(row.inputs) for row in rows)
    log_probs, are_greedy = [0.0] * len(rows), [True] * len(rows)
    for start in range(0, width, CHUNK):
        stop = start + CHUNK
        is_scored = any(row.counts(start, stop) for row in rows)
        part = pad_tokens([row.inputs[start:stop] for row in rows], [start] * len(rows), model)
        at = part.begin(model, cache, device, has_logits=is_scored)
        if not is_scored:
            executor.extend(at)
            continue
        labels = pad_tokens([row.labels[start:stop] for row in rows], [start] * len(rows), model).rows
        found = executor.score(at, torch.tensor(labels, device=device)).double().cpu()
        for index, row in enumerate(rows):
            counted = [position - start for position in row.counts(start, stop)]
            log_probs[index] += found[index, counted, 0].sum().item()
            are_greedy[index] &= bool(found[index, counted, 1].all())
    return [Score(*both) for both in zip(log_probs, are_greedy, strict=True)]


def _row(context: Context, continuation: Context, seq_length: int) -> _Row:
    assert context and 0 < len(continuation) <= seq_length, f"{len(context)} and {len(continuation)} tokens"
    tokens = [*context, *continuation][-(seq_length + 1) :]
    return _Row(tokens[:-1], tokens[1:], len(continuation))
