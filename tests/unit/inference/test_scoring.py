"""Fact: scores are sums of log probabilities of whole contexts, in every layout; the harness gets them from texts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, processors

from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from megatron3d.inference import sampling as scoring
from megatron3d.inference.lm_eval_adapter import Harness, as_lm
from megatron3d.inference.sampling import Score, score
from megatron3d.pipeline.engine import PipelineExecutor
from tests.support.turn_ranks import run_turns
from tests.unit.inference.test_sampling import (
    CPU,
    LENGTH,
    MODELS,
    VOCAB_SIZE,
    executor_of,
    tensor_layouts,
    whole_logits,
)

Pair = tuple[list[int], list[int]]
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=LENGTH)
PAIRS: list[Pair] = [([1, 2, 3], [4, 5]), ([6], [*range(LENGTH)]), ([*range(20)], [7, 7, 7]), ([9], [1])]


@pytest.fixture(scope="module", params=MODELS)
def executor(request: pytest.FixtureRequest) -> PipelineExecutor:
    return executor_of(MODELS[request.param], {})


def plain_score(executor: PipelineExecutor, context: Sequence[int], continuation: Sequence[int]) -> Score:
    """Score one token at a time, each after the longest context that the model takes for the whole continuation."""
    room = LENGTH + 1 - len(continuation)
    before, total, is_greedy = list(context)[-room:], 0.0, True
    for token in continuation:
        logits = whole_logits(executor, before)
        total += logits.log_softmax(-1)[token].item()
        is_greedy &= int(logits.argmax()) == token
        before.append(token)
    return Score(total, is_greedy)


def close(a: Score, b: Score) -> bool:
    return a.is_greedy == b.is_greedy and math.isclose(a.log_prob, b.log_prob, rel_tol=1e-10)


@settings(max_examples=15)
@given(pairs=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5), chunk=st.integers(1, 14))
def test_sums_of_log_probabilities(executor: PipelineExecutor, pairs: list[Pair], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK", chunk)
        found = score(executor, pairs, CPU)
    assert all(close(got, plain_score(executor, *pair)) for got, pair in zip(found, pairs, strict=True))


def test_greedy_decoding_is_scored_as_greedy(executor: PipelineExecutor) -> None:
    context = [3, 1]
    likeliest = int(whole_logits(executor, context).argmax())
    greedy, other = score(executor, [(context, [likeliest]), (context, [(likeliest + 1) % VOCAB_SIZE])], CPU)
    assert greedy.is_greedy and not other.is_greedy


def scores(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[list[Score]]:
    flows = (executor_of(MODELS["llama"], layout, world_size, rank) for layout in layouts)
    return [score(executor, PAIRS, CPU) for executor in flows]


def test_every_layout() -> None:
    layouts = [{**layout, "pipeline_model_parallel_size": 2} for layout in tensor_layouts(4)]
    layouts.append({"context_parallel_size": 2, "tensor_model_parallel_size": 2})
    alone = score(executor_of(MODELS["llama"], {}), PAIRS, CPU)
    for found in run_turns(scores, 8, layouts):
        for layout, got in zip(layouts, found, strict=True):
            assert all(close(one, other) for one, other in zip(got, alone, strict=True)), layout


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness(executor_of({**MODELS["gpt2"], "vocab_size": 257}, {}), ByteTokenizer(None), CPU, batch_size=2)


def request(*args: Any) -> SimpleNamespace:
    """Return a request as the harness builds it."""
    return SimpleNamespace(args=args)


def test_log_likelihoods(harness: Harness) -> None:
    pairs = [("a b", " c"), ("", "xy"), ("the ", "d"), ("long " * 9, "e"), ("é", "ü")]
    split: list[Pair] = [
        (list(b"a b"), list(b" c")),
        ([256], list(b"xy")),
        (list(b"the"), list(b" d")),
        (list(b"long " * 8 + b"long"), list(b" e")),
        (list("é".encode()), list("ü".encode())),
    ]
    wanted = [plain_score(harness.executor, *pair) for pair in split]
    found = harness.log_likelihoods(pairs)
    assert all(close(Score(*got), other) for got, other in zip(found, wanted, strict=True))


def merging_tokenizer(folder: Path, adds_bos: bool) -> Tokenizer:
    """Return a tokenizer that merges a and b, and may put <s> before every text."""
    vocab = {piece: i for i, piece in enumerate(("<s>", "</s>", "a", "b", "c", " ", "ab"))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    library.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"} if adds_bos else {"eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return build_tokenizer("HuggingFaceTokenizer", str(folder))


def lm_eval_pair(theirs: Any, context: str, continuation: str) -> Pair:
    """Encode a pair as TemplateLM of lm_eval 0.4 does, with a tokenizer of transformers."""
    prefix = theirs.eos_token_id if theirs.bos_token_id is None else theirs.bos_token_id

    def encode(text: str) -> list[int]:
        ids: list[int] = theirs.encode(text, add_special_tokens=not text.startswith(theirs.decode([prefix])))
        return ids

    if context == "":
        ids = theirs.encode(continuation, add_special_tokens=False)
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, before = encode(context + continuation), encode(context)
    return before, whole[len(before) :]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_pairs_are_encoded_as_in_lm_eval(harness: Harness, tmp_path: Path, adds_bos: bool) -> None:
    ours = merging_tokenizer(tmp_path, adds_bos)
    mine = Harness(harness.executor, ours, CPU, begin=ours.special.before_text(None))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for pair in (("ca", "bc"), ("c ", "ab"), ("", "ab"), ("c a  ", "b c"), ("ab", "c"), ("<s>c", "a"), ("", "<s>c")):
        wanted = lm_eval_pair(theirs, *pair)
        assert mine._encode_pair(*pair) == wanted, pair
        got, score = mine.log_likelihoods([pair])[0], plain_score(harness.executor, *wanted)
        assert close(Score(*got), score)
    assert mine._encode_pair("  ", "c")[0] == [0 if adds_bos else 1]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_whole_texts_are_encoded_as_in_lm_eval(harness: Harness, tmp_path: Path, adds_bos: bool) -> None:
    """The token that begins texts stands behind the prefix and is scored."""
    ours = merging_tokenizer(tmp_path, adds_bos)
    mine = Harness(harness.executor, ours, CPU, begin=ours.special.before_text(None))
    ids = [0, 0, 4, 6] if adds_bos else [1, 4, 6]
    wanted = plain_score(harness.executor, ids[:1], ids[1:]).log_prob
    assert math.isclose(mine.rolling(["cab"])[0], wanted, rel_tol=1e-10)


def test_generation_stops_at_any_end(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = harness.generate([("abc", {"max_gen_toks": 6})])
    ends = replace(ByteTokenizer.special, ends=(256, text.encode()[0]))
    monkeypatch.setattr(ByteTokenizer, "special", ends)
    assert harness.generate([("abc", {"max_gen_toks": 6})]) == [""]


def test_whole_texts(harness: Harness) -> None:
    """Every byte is predicted once; the last window has as much context as fits."""
    text = "abcdefghijklmnopqrstuvwxyz"[: 2 * LENGTH + 1]
    ids = [256, *text.encode()]
    wanted = plain_score(harness.executor, ids[:1], ids[1 : LENGTH + 1]).log_prob
    wanted += plain_score(harness.executor, ids[LENGTH : LENGTH + 1], ids[LENGTH + 1 : 2 * LENGTH + 1]).log_prob
    wanted += plain_score(harness.executor, ids[LENGTH + 1 : 2 * LENGTH + 1], ids[2 * LENGTH + 1 :]).log_prob
    found, empty = harness.rolling([text, ""])
    assert math.isclose(found, wanted, rel_tol=1e-10) and empty == 0


def test_generation_ends(harness: Harness) -> None:
    (whole,) = harness.generate([("abc", {"max_gen_toks": 6})])
    assert whole
    end = whole[2:4] or whole[-1]
    (short,) = harness.generate([("abc", {"until": [end], "max_gen_toks": 6})])
    assert short == whole[: whole.find(end)]
    (few,) = harness.generate([("abc" * 20, {"until": "\0\0", "max_gen_toks": 2})])
    assert len(few) <= 2


def test_refused(harness: Harness, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"13 tokens, and the model sees 1 to 12"):
        harness.log_likelihoods([("a", "x" * 13)])
    with pytest.raises(UserError, match=r"0 tokens"):
        harness.log_likelihoods([("a", "")])
    (tmp_path / "chars.json").write_text('["a", "b"]')
    endless = Harness(harness.executor, CharTokenizer(str(tmp_path / "chars.json")), CPU)
    with pytest.raises(UserError, match="has no token that ends a document"):
        endless.rolling(["ab"])


def test_the_adapter_answers_requests_in_order(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests give answers in order; without lm_eval a message says what to install."""
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    model = as_lm(harness)
    assert model.loglikelihood([request("a", "b"), request("c", "d")]) == harness.log_likelihoods(
        [("a", "b"), ("c", "d")]
    )
    assert model.loglikelihood_rolling([request("abc")]) == harness.rolling(["abc"])
    assert model.generate_until([request("ab", {"max_gen_toks": 3})]) == harness.generate([("ab", {"max_gen_toks": 3})])
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match="lm_eval is not installed: pip install lm_eval"):
        as_lm(harness)
