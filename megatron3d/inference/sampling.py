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
import torch.nn.functional as F
from torch import Tensor

from megatron3d.model.gpt import GPT
from megatron3d.model.layer_kinds import has_window
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
        return draw(self.probabilities(logits_V), generator)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the distribution [V] in float64 that tokens are drawn from; at temperature 0 that of the likeliest."""
        if self.temperature == 0:
            return F.one_hot(logits_V.argmax(), len(logits_V)).double()
        if self.top_k:
            least = logits_V.topk(min(self.top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
        return (logits_V.double() / self.temperature).softmax(-1)


def draw(weights_V: Tensor, generator: torch.Generator) -> int:
    """Return a token drawn by weights [V], which need not add up to 1."""
    return int(torch.multinomial(weights_V, 1, generator=generator))


@dataclass(frozen=True)
class PaddedTokens:
    """New tokens of all sequences of a microbatch, padded to one width.

    Attributes:
        starts: position of each row's first token.
        counts: tokens of each row that are no padding.
    """

    rows: list[list[int]]
    starts: list[int]
    counts: list[int]

    def begin(self, model: GPT, cache: KVCache, device: torch.device, has_logits: bool) -> Pass:
        """Return the pass that extends the cache by these tokens.

        Padding follows the last token of a row; its cache entries are overwritten before they are attended to, and
        rings of windows have none.
        """
        tokens, first = torch.tensor(self.rows, device=device), torch.tensor(self.starts, device=device)
        width, last = tokens.shape[1], cache.capacity - 1
        positions = (first.unsqueeze(1) + torch.arange(width, device=device)).clamp_(max=last)
        low, high = span(len(tokens), model.mode.batch_axes, model.comm.mesh)
        length = max(self.starts) + width
        if not model.order.context:
            length = cache.attended_length(min(length, cache.capacity), device)
        ends = first + torch.tensor(self.counts, device=device)
        return model.begin_extending(tokens[low:high], positions, ends, length, cache, has_logits=has_logits)


def pad_tokens(new: Sequence[list[int]], starts: Sequence[int], model: GPT) -> PaddedTokens:
    """Pad the rows to a microbatch that the model's layout can split; added rows repeat the first one."""
    mesh, mode = model.comm.mesh, model.mode
    layouts = (mode.inner[0], mode.home if model.arch.experts else mode.residual[0], mode.batch_axes)
    unit = math.lcm(*(mesh.size(axis for axis in axes if axis not in mode.context) for axes in layouts))
    chunks = 2 * mesh.size(mode.context) if mode.context else 1  # of a sequence
    more, width = -len(new) % unit, -(-max(map(len, new)) // chunks) * chunks
    rows = [row + [0] * (width - len(row)) for row in (*new, *[new[0]] * more)]
    return PaddedTokens(rows, [*starts, *[starts[0]] * more], list(map(len, (*new, *[new[0]] * more))))


class Sampler:
    """Model with a KV cache; every rank must make the same calls.

    Args:
        keeps_hidden: keep the final hidden states of all positions, from which modules of multi-token prediction draft.
    """

    def __init__(self, executor: PipelineExecutor, device: torch.device, keeps_hidden: bool = False) -> None:
        self.executor, self._device, self._keeps_hidden = executor, device, keeps_hidden
        self._held: list[list[int]] = []
        self.cache = self._new_cache()

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest context that fits the model."""
        return self.executor.model.arch.seq_length

    def _new_cache(self) -> KVCache:
        forgets = (
            has_window(self.executor.model.arch) and not self._keeps_hidden
        )  # drafts may go back by several tokens
        return KVCache(self.capacity, self._keeps_hidden, forgets)

    def next_logits(self, contexts: Sequence[Context]) -> Tensor:
        """Return next-token logits [contexts, V] on the CPU, the same on every rank."""
        return torch.stack([logits_SV[-1] for logits_SV in self.last_logits(contexts, 1)])

    def last_logits(self, contexts: Sequence[Context], count: int) -> list[Tensor]:
        """Return for each context the logits [S, V] after each of its last `count` tokens, or of as many as it has.

        They are on the CPU and the same on every rank.  All rows of the last pass are as wide, so that no padding
        follows a context that ends at the model's length.
        """
        assert count <= KVCache.BACK or not self.cache.forgets, "layers with a window keep no more than the window"
        windows = self._windows(contexts)
        self._cache_up_to(windows, [max(len(window) - count, 0) for window in windows])
        last = [window[-count:] for window in windows]
        starts = [len(window) - len(tokens) for window, tokens in zip(windows, last, strict=True)]
        widest = max(map(len, last))
        logits_BSV = self.executor.next_logits(self.begin(last, starts, has_logits=True), widest).cpu()
        self._held = windows
        return [logits_SV[: len(tokens)] for logits_SV, tokens in zip(logits_BSV, last, strict=False)]

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Add all tokens but the last of each context to the cache."""
        windows = self._windows(contexts)
        self._cache_up_to(windows, [len(window) - 1 for window in windows])

    def _windows(self, contexts: Sequence[Context]) -> list[list[int]]:
        assert contexts and all(contexts), "every context has a token"
        return [list(context[-self.capacity :]) for context in contexts]

    def _cache_up_to(self, windows: Sequence[list[int]], ends: Sequence[int]) -> None:
        """Add the tokens before `ends` to the cache, as far as they are not in it."""
        if len(windows) != len(self._held):
            self._held, self.cache = [[] for _ in windows], self._new_cache()
        starts = [self._start(held, window[:end]) for held, window, end in zip(self._held, windows, ends, strict=True)]
        new = [window[start:end] for window, start, end in zip(windows, starts, ends, strict=True)]
        step = PREFILL * self.executor.model.order.num_ranks
        for first in range(0, max(map(len, new)), step):
            part = [tokens[first : first + step] for tokens in new]
            places = [start + min(first, len(tokens)) for start, tokens in zip(starts, new, strict=True)]
            self.executor.extend(self.begin(part, places, has_logits=False))
        if any(new):  # padding of shorter rows is behind their ends
            self._held = [window[:end] for window, end in zip(windows, ends, strict=True)]

    def _start(self, held: list[int], context: list[int]) -> int:
        """Return from which position on a context is computed: behind what it shares with the cached tokens, or all."""
        start = num_shared(held, context)
        return start if self.cache.can_go_back(len(held), start) else 0

    def begin(self, new: Sequence[list[int]], starts: Sequence[int], has_logits: bool) -> Pass:
        """Return the pass of new tokens of each context, the first of them at `starts`."""
        model = self.executor.model
        return pad_tokens(new, starts, model).begin(model, self.cache, self._device, has_logits)


def num_shared(held: list[int], context: list[int]) -> int:
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


# Returns one or several next tokens of each text; those of texts that are done mean nothing.
NextTokens = Callable[[Sequence[Text]], list[list[int]]]


def sample(
    sampler: Sampler,
    texts: Sequence[Text],
    choose: Callable[[Tensor, torch.Generator], int],
    ends: Collection[int],
    tell: Callable[[int, int], None] = lambda row, token: None,
) -> None:
    """Generate token by token, each chosen by the logits, until every text is done; as `generate` does."""

    def next_tokens(texts: Sequence[Text]) -> list[list[int]]:
        logits = sampler.next_logits([text.tokens for text in texts])
        return [
            [] if text.is_done else [choose(logits_V, text.generator)]
            for text, logits_V in zip(texts, logits, strict=True)
        ]

    generate(next_tokens, texts, ends, tell)


def generate(
    next_tokens: NextTokens,
    texts: Sequence[Text],
    ends: Collection[int],
    tell: Callable[[int, int], None] = lambda row, token: None,
) -> None:
    """Generate until every text is done, equally on every rank: at its length, or at one of the tokens `ends`.

    Calls `tell` with a text's index and each new token.
    """
    while not all(text.is_done for text in texts):
        for row, (text, tokens) in enumerate(zip(texts, next_tokens(texts), strict=True)):
            for token in tokens:
                if text.is_done:
                    break
                if token in ends:
                    text.is_done = True
                    break
                text.tokens.append(token)
                text.num_left -= 1
                text.is_done = text.num_left == 0
                tell(row, token)
