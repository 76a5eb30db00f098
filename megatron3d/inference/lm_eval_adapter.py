"""Adapter to EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

The harness requests the log probability of a continuation, that of a whole text, and the continuation of a prompt.  It
is an optional dependency: `Harness` works without it, and `as_lm` wraps a `Harness` in the harness's model class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron3d.data.tokenizers.special_tokens import with_beginning
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError
from megatron3d.inference.continuation import cut
from megatron3d.inference.sampling import Choice, Sampler, Score, Text, sample, score
from megatron3d.pipeline.engine import PipelineExecutor

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Harness:
    """Model that answers requests; every rank must make the same requests in the same order.

    Attributes:
        begin: tokens before every text.
    """

    executor: PipelineExecutor
    tokenizer: Tokenizer
    device: torch.device
    batch_size: int = 8
    begin: tuple[int, ...] = ()

    @property
    def max_length(self) -> int:
        """Length of the model's context in tokens."""
        return self.executor.model.arch.seq_length

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log probability, and whether greedy decoding generates it."""
        scores = self._scores([self._encode_pair(*pair) for pair in pairs])
        return [(each.log_prob, each.is_greedy) for each in scores]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log probability of each text; every token is predicted once, from the longest context."""
        windows = [(place, window) for place, text in enumerate(texts) for window in self._windows(text)]
        sums = [0.0] * len(texts)
        for (place, _), each in zip(windows, self._scores([window for _, window in windows]), strict=True):
            sums[place] += each.log_prob
        return sums

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate after each prompt up to a string of its `until`, the document's end, or `max_gen_toks`."""
        said: list[str] = []
        for prompt, options in requests:
            until = options.get("until") or ()
            ends = [end for end in ([until] if isinstance(until, str) else until) if end]
            is_greedy = not options.get("do_sample", options.get("temperature", 0) > 0)
            choose = Choice(0.0 if is_greedy else options.get("temperature", 1.0), options.get("top_k", 0))
            said.append(self._generate(prompt, ends, choose, int(options.get("max_gen_toks", MAX_NEW_TOKENS))))
        return said

    def _generate(self, prompt: str, ends: Sequence[str], choose: Choice, most: int) -> str:
        most = min(most, self.max_length - 1)
        tokens = (self._encode(prompt) or [self._prefix()])[-(self.max_length - most) :]
        text, start = Text(tokens, torch.Generator().manual_seed(0), most), len(tokens)

        def stop(_: int, __: int) -> None:
            new = self.tokenizer.decode(text.tokens[start:])
            text.is_done = text.is_done or any(end in new for end in ends)

        sample(Sampler(self.executor, self.device), [text], choose, self.tokenizer.special.ends, stop)
        return cut(self.tokenizer.decode(text.tokens[start:]), ends)

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        """Return the scores in the order of the pairs, computed in batches of similar length, the longest first."""
        order = sorted(range(len(pairs)), key=lambda place: -sum(map(len, pairs[place])))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            found = score(self.executor, [pairs[place] for place in places], self.device)
            scores |= zip(places, found, strict=True)
        return [scores[place] for place in range(len(pairs))]

    def _prefix(self) -> int:
        """Return the token before a text without a context."""
        prefix = self.tokenizer.special.prefix
        if prefix is None:
            raise UserError(
                f"{type(self.tokenizer).__name__} has no token that ends a document, which would stand before a text "
                "without a context; evaluate with a tokenizer that has one"
            )
        return prefix

    def _encode(self, text: str) -> list[int]:
        return with_beginning(self.begin, self.tokenizer.encode(text))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a pair as lm_eval does: the context alone, and what the whole text has after as many tokens.

        Trailing spaces of the context move to the continuation, where most tokenizers put them.
        """
        if not context:
            tokens = with_beginning([self._prefix()], self.tokenizer.encode(continuation))
            before, after = tokens[:1], tokens[1:]
        else:
            stripped = context.rstrip()
            before, whole = self._encode(stripped), self._encode(context + continuation)
            after = whole[len(before) :]
            before = before or [self._prefix()]
        if not 0 < len(after) <= self.max_length:
            raise UserError(
                f"continuation {continuation[:40]!r}: {len(after)} tokens, and the model sees 1 to {self.max_length}; "
                "choose a task with shorter answers, or a model with a longer model.seq_length"
            )
        return before, after

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (context, labels): consecutive runs of labels, each after the longest context that fits."""
        tokens = [self._prefix(), *self._encode(text)]  # a token that begins texts is scored too, as in lm_eval
        for first in range(1, len(tokens), self.max_length):
            labels = tokens[first : first + self.max_length]
            yield tokens[max(0, first + len(labels) - 1 - self.max_length) : first], labels


def as_lm(harness: Harness) -> Any:
    """Return an instance of the harness's `LM`; raises UserError if the harness is not installed."""
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UserError("lm_eval is not installed: pip install lm_eval") from error

    class Megatron3dLM(LM):  # type: ignore[misc]
        """Model of the harness; each request has its text in `args`."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return harness.log_likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return harness.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return harness.generate([request.args for request in requests])

    return Megatron3dLM()
