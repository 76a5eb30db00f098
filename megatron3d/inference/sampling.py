"""Sampling with a KV cache in any layout: next-token logits of a batch of growing contexts, and choice of a token.

    cached    t0 t1 t2                tokens of a context in the KV cache
    context   t0 t1 t2 t3 t4          prefill t3; decoding t4 gives the logits of t5

The common prefix of a context and the cache is not recomputed.  A context longer than `seq_length` keeps its last
`seq_length` tokens, whose positions change with every token, so that each further token costs a whole prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.ops.kv_cache import KVCache
from megatron3d.parallel.layout import span
from megatron3d.pipeline.executor import PipelineExecutor

Context = Sequence[int]
# New tokens of a sequence that a context rank prefills at once: masks and scores grow with them times the length.
PREFILL = 1024


@dataclass(frozen=True)
class Choice:
    """Sampling rule: a token drawn from softmax(logits / temperature) over the `top_k` likeliest tokens (0: all)."""

    temperature: float
    top_k: int = 0

    def __call__(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return a token drawn by logits [V]; the likeliest one at temperature 0."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        if self.top_k:
            least = logits_V.topk(min(self.top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
        weights = (logits_V.double() / self.temperature).softmax(-1)
        return int(torch.multinomial(weights, 1, generator=generator))


@dataclass(frozen=True)
class PaddedTokens:
    """New tokens of all sequences of a microbatch, padded to one width, and the position of each row's first token."""

    rows: list[list[int]]
    starts: list[int]

    def begin(self, model: GPT, cache: KVCache, device: torch.device, has_logits: bool) -> Pass:
        """Return the pass that extends the cache by these tokens.

        Padding follows the last token of a row; its cache entries are overwritten before they are attended to.
        """
        tokens, first = torch.tensor(self.rows, device=device), torch.tensor(self.starts, device=device)
        width, last = tokens.shape[1], cache.capacity - 1
        positions = (first.unsqueeze(1) + torch.arange(width, device=device)).clamp_(max=last)
        low, high = span(len(tokens), model.mode.batch_axes, model.comm.mesh)
        length = max(self.starts) + width
        if not model.order.context:
            length = cache.attended_length(min(length, cache.capacity), device)
        return model.begin_extending(tokens[low:high], positions, length, cache, has_logits=has_logits)


def pad_tokens(new: Sequence[list[int]], starts: Sequence[int], model: GPT) -> PaddedTokens:
    """Pad the rows to a microbatch that the model's layout can split; added rows repeat the first one."""
    mesh, mode = model.comm.mesh, model.mode
    layouts = (mode.inner[0], mode.residual[0], mode.batch_axes)
    unit = math.lcm(*(mesh.size(axis for axis in axes if axis not in mode.context) for axes in layouts))
    chunks = 2 * mesh.size(mode.context) if mode.context else 1  # of a sequence
    more, width = -len(new) % unit, -(-max(map(len, new)) // chunks) * chunks
    rows = [row + [0] * (width - len(row)) for row in (*new, *[new[0]] * more)]
    return PaddedTokens(rows, [*starts, *[starts[0]] * more])


class Sampler:
    """Model with a KV cache; every rank must make the same calls."""

    def __init__(self, executor: PipelineExecutor, device: torch.device) -> None:
        self.executor, self._device = executor, device
        self._held: list[list[int]] = []
        self._cache = KVCache(self.capacity)

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest context that fits the model."""
        return self.executor.model.arch.seq_length

    def next_logits(self, contexts: Sequence[Context]) -> Tensor:
        """Return next-token logits [contexts, V] on the CPU, the same on every rank."""
        assert contexts and all(contexts), "every context has a token"
        model = self.executor.model
        windows = [list(context[-self.capacity :]) for context in contexts]
        if len(windows) != len(self._held):
            self._held, self._cache = [[] for _ in windows], KVCache(self.capacity)
        starts = [_shared(held, window[:-1]) for held, window in zip(self._held, windows, strict=True)]
        new = [window[start:-1] for window, start in zip(windows, starts, strict=True)]
        step = PREFILL * model.order.num_ranks
        for first in range(0, max(map(len, new)), step):
            part = [tokens[first : first + step] for tokens in new]
            places = [start + min(first, len(tokens)) for start, tokens in zip(starts, new, strict=True)]
            self.executor.extend(self._begin(part, places, has_logits=False))
        self._held = windows
        last, places = [window[-1:] for window in windows], [len(window) - 1 for window in windows]
        logits = self.executor.next_logits(self._begin(last, places, has_logits=True))
        return logits[: len(windows)].cpu()

    def _begin(self, new: Sequence[list[int]], starts: Sequence[int], has_logits: bool) -> Pass:
        model = self.executor.model
        return pad_tokens(new, starts, model).begin(model, self._cache, self._device, has_logits)


def _shared(held: list[int], context: list[int]) -> int:
    """Return the length of the common prefix of the cached tokens and a context."""
    if held == context[: len(held)]:
        return len(held)
    return next((place for place, (a, b) in enumerate(zip(held, context, strict=False)) if a != b), len(context))


@dataclass
class Text:
    """Tokens of a text that grows until `num_left` tokens are added or the document ends, and its generator."""

    tokens: list[int]
    generator: torch.Generator
    num_left: int
    is_done: bool = field(default=False)

    def __post_init__(self) -> None:
        self.is_done = self.num_left == 0


def sample(
    sampler: Sampler,
    texts: Sequence[Text],
    choose: Callable[[Tensor, torch.Generator], int],
    ends: Collection[int],
    tell: Callable[[int, int], None] = lambda row, token: None,
) -> None:
    """Generate until every text is done, equally on every rank: at its length, or at one of the tokens `ends`.

    Calls `tell` with a text's index and each new token.
    """
    while not all(text.is_done for text in texts):
        logits = sampler.next_logits([text.tokens for text in texts])
        for row, text in enumerate(texts):
            if text.is_done:
                continue
            token = choose(logits[row], text.generator)
            if token in ends:
                text.is_done = True
                continue
            text.tokens.append(token)
            text.num_left -= 1
            text.is_done = text.num_left == 0
            tell(row, token)
