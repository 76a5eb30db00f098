"""Sampling and log probabilities with a KV cache in any layout, with speculative generation.

    cached    t0 t1 t2                tokens of a context in the KV cache
    context   t0 t1 t2 t3 t4          prefill t3; decoding t4 gives the logits of t5

The common prefix of a context and the cache is not recomputed.  A context longer than `seq_length` keeps its last
`seq_length` tokens, whose positions change with every token, so that each further token costs a whole prefill.

Modules of multi-token prediction draft tokens, and the model verifies them in one forward (Leviathan et al. 2023,
arXiv:2211.17192; with these modules DeepSeek-AI 2024, arXiv:2412.19437, section 2.3).

    text      t0 .. t3                    its last token is not in the cache
    draft     t4, t5                      t4 by module 1 from h of t2 and t3; t5 by module 2 from module 1 and t4
    verify    logits after t3, t4, t5     t4 and t5 are kept as far as they are accepted, and one more token is drawn

A draft t of probability q(t) is kept with probability min(1, p(t) / q(t)), p being the model's; in place of the first
rejected one a token is drawn from max(p - q, 0).  So tokens have the model's distribution, and at temperature 0 they
are those of generation without drafts.  Rejected positions in the caches are overwritten before they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.attention.kv_cache import KVCache
from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.model.spec import has_window
from megatron3d.parallel.layout import span
from megatron3d.pipeline.engine import PipelineExecutor

Context = Sequence[int]
# New tokens of a sequence that a context rank prefills at once: masks and scores grow with them times the length.
PREFILL = 1024


@dataclass(frozen=True)
class Choice:
    """Sampling rule: a token drawn from softmax(logits / temperature) over the tokens that `top_k` and `top_p` leave.

    These are the `top_k` likeliest tokens (0: all), and of these the fewest likeliest ones whose probabilities add up
    to `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751), one at least.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

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
        p_V = (logits_V.double() / self.temperature).softmax(-1)
        return p_V if self.top_p == 1 else nucleus(p_V, self.top_p)


def nucleus(p_V: Tensor, top_p: float) -> Tensor:
    """Return the distribution over the fewest likeliest tokens that have `top_p` of the probability; equal ones that
    do not all fit are taken from the last."""
    rising_V, order_V = p_V.sort(stable=True)
    rest_V = rising_V.cumsum(-1) <= 1 - top_p  # as in transformers
    rest_V[-1] = False
    kept_V = p_V.masked_fill(torch.zeros_like(rest_V).scatter(-1, order_V, rest_V), 0)
    return kept_V / kept_V.sum()


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
        # Drafts may go back by several tokens.
        forgets = has_window(self.executor.model.arch) and not self._keeps_hidden
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
    is_done: bool = False

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


class Draft(NamedTuple):
    """A drafted token and the distribution [V] that it was drawn from."""

    token: int
    q_V: Tensor


def verified(
    logits: Sequence[Tensor], drafts: Sequence[Draft], choice: Choice, generator: torch.Generator
) -> list[int]:
    """Return the drafts that are accepted, then one token more.

    Args:
        logits: the model's, [V], after the token before the drafts and after each of them.
    """
    kept: list[int] = []
    for logits_V, draft in zip(logits, drafts, strict=False):
        p_V = choice.probabilities(logits_V)
        uniform = torch.rand((), dtype=torch.float64, generator=generator)
        if uniform * draft.q_V[draft.token] >= p_V[draft.token]:
            rest_V = (p_V - draft.q_V).clamp(min=0)
            return [*kept, draw(rest_V if rest_V.any() else p_V, generator)]
        kept.append(draft.token)
    return [*kept, choice(logits[len(kept)], generator)]


@dataclass
class Speculation:
    """Generation of several tokens at once for texts that grow; every rank must make the same calls.

    Attributes:
        num_drafts: tokens drafted at most at once, one by each of the first modules.
        num_proposed, num_accepted: drafts so far.
    """

    sampler: Sampler
    choice: Choice
    num_drafts: int
    num_proposed: int = 0
    num_accepted: int = 0
    _seen: list[list[int]] = field(default_factory=list)
    _cache: KVCache | None = None

    def __call__(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the next tokens of each text, at least one; of texts that are done they mean nothing."""
        limits = [self._limit(text) for text in texts]
        drafts = self._draft(texts, limits) if any(limits) else [[] for _ in texts]
        contexts = [[*text.tokens, *(each.token for each in row)] for text, row in zip(texts, drafts, strict=True)]
        logits = self.sampler.last_logits(contexts, 1 + max(map(len, drafts)))
        found = []
        for text, row, logits_SV in zip(texts, drafts, logits, strict=True):
            after_SV = logits_SV[len(logits_SV) - 1 - len(row) :]
            found.append(verified(list(after_SV), row, self.choice, text.generator))
            self.num_proposed += len(row)
            self.num_accepted += len(found[-1]) - 1
        return found

    def report(self) -> str:
        """Return how many drafts were accepted."""
        share = self.num_accepted / max(self.num_proposed, 1)
        return f"drafts: {self.num_accepted:,} of {self.num_proposed:,} tokens accepted ({share:.1%})"

    def _limit(self, text: Text) -> int:
        """Return how many tokens to draft: none where the model's length has no position left, or the text no token."""
        if text.is_done or len(text.tokens) < 2:
            return 0
        return max(0, min(self.num_drafts, self.sampler.capacity - len(text.tokens), text.num_left - 1))

    def _draft(self, texts: Sequence[Text], limits: Sequence[int]) -> list[list[Draft]]:
        """Return the drafts of each text, as many as its limit, each chosen after those before it."""
        known = [list(text.tokens[-self.sampler.capacity :]) for text in texts]
        self.sampler.prefill(known)
        ends = [max(len(tokens) - 1, 0) for tokens in known]  # positions that have hidden states
        firsts = self._catch_up(known, ends, limits)
        width = max(1, *(end - first for first, end in zip(firsts, ends, strict=True)))
        firsts = [max(end - width, 0) for end in ends]
        drafts: list[list[Draft]] = [[] for _ in texts]

        def choose(logits_BV: Tensor) -> None:
            for row, (text, limit) in enumerate(zip(texts, limits, strict=True)):
                if len(drafts[row]) < limit:
                    q_V = self.choice.probabilities(logits_BV[row])
                    drafts[row].append(Draft(draw(q_V, text.generator), q_V))
                    known[row].append(drafts[row][-1].token)

        lasts = [max(end - 1 - first, 0) for first, end in zip(firsts, ends, strict=True)]
        self._run_modules(known, firsts, width, lasts, choose)
        for row, limit in enumerate(limits):
            if limit:
                self._seen[row] = known[row][: ends[row] + self.num_drafts]  # the last draft is read by no module
        return drafts

    def _catch_up(self, known: Sequence[list[int]], ends: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Run the modules over long stretches in pieces; return from where on their caches lack the text's tokens.

        Module k has read k tokens beyond a position, so that its last entries may be of drafts that were rejected.
        """
        if self._cache is not self.sampler.cache:
            self._cache, self._seen = self.sampler.cache, [[] for _ in known]
        firsts = [
            min(max(num_shared(seen, tokens) - self.num_drafts, 0), end) if limit else end
            for seen, tokens, end, limit in zip(self._seen, known, ends, limits, strict=True)
        ]
        step = max(PREFILL, self.num_drafts + 1) * self.sampler.executor.model.order.num_ranks
        while max(end - first for first, end in zip(firsts, ends, strict=True)) > step:
            self._run_modules(known, firsts, step)
            firsts = [
                max(first, min(first + step, end - self.num_drafts)) for first, end in zip(firsts, ends, strict=True)
            ]
        return firsts

    def _run_modules(
        self,
        known: Sequence[list[int]],
        firsts: Sequence[int],
        width: int,
        lasts: Sequence[int] = (),
        choose: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Run all modules over `width` positions of each text; give `choose` each one's logits [texts, V] at `lasts`.

        Tokens that are not known yet are read as token 0.
        """
        x_MH: Tensor | None = None
        for depth in range(self.num_drafts):
            places = [first + depth + 1 for first in firsts]
            rows = [
                (tokens[place : place + width] + [0] * width)[:width]
                for tokens, place in zip(known, places, strict=True)
            ]
            at = self.sampler.begin(rows, firsts, has_logits=choose is not None)
            x_MH, logits_BV = self.sampler.executor.draft(depth, x_MH, at, lasts)
            if choose is not None and logits_BV is not None:
                choose(logits_BV.cpu())


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
    model, rows = executor.model, list[_Row]()
    for context, continuation in pairs:
        assert context and 0 < len(continuation) <= model.arch.seq_length, (
            f"{len(context)} and {len(continuation)} tokens"
        )
        tokens = [*context, *continuation][-(model.arch.seq_length + 1) :]
        rows.append(_Row(tokens[:-1], tokens[1:], len(continuation)))
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
