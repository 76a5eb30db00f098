"""Speculative generation: modules of multi-token prediction draft tokens, and the model verifies them in one forward
(Leviathan et al. 2023, arXiv:2211.17192; with these modules DeepSeek-AI 2024, arXiv:2412.19437, section 2.3).

    text      t0 .. t3                    its last token is not in the cache
    draft     t4, t5                      t4 by module 1 from h of t2 and t3; t5 by module 2 from module 1 and t4
    verify    logits after t3, t4, t5     t4 and t5 are kept as far as they are accepted, and one more token is drawn

A draft t of probability q(t) is kept with probability min(1, p(t) / q(t)), p being the model's; in place of the first
rejected one a token is drawn from max(p - q, 0).  So tokens have the model's distribution, and at temperature 0 they
are those of generation without drafts.  Rejected positions in the caches are overwritten before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.inference.sampling import PREFILL, Choice, Sampler, Text, draw, num_shared
from megatron3d.ops.kv_cache import KVCache


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
