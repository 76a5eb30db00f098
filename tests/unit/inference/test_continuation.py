"""Fact: the pieces of a text that grows are whole characters, and together its text up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron3d.inference.continuation import UNFINISHED, Continuation, cut
from megatron3d.inference.sampling import Choice, Text, generate
from tools import train_tokenizer

SAID = "Größe: 12 €, naïve café – 漢字 🙂.\nStop STOP stopped, and it STOPs; a  b   c."
KINDS = ("bytes", "byte-bpe", "unigram")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return tokenizers whose characters are one or several tokens, and whose tokens are one or several characters."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text("\n".join([SAID, SAID.lower(), "a stop, a start and a step of the old top"] * 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_tokenizer, "train_in_child", train_tokenizer.train)
        for kind, size in (("byte-bpe", "300"), ("unigram", "300")):
            typed = ["--input", str(folder / "text.txt"), "--type", kind, "--vocab-size", size]
            assert train_tokenizer.main([*typed, "--output-prefix", str(folder / kind)]) == 0
    return {
        "bytes": ByteTokenizer(None),
        "byte-bpe": HuggingFaceTokenizer(str(folder / "byte-bpe.tokenizer.json")),
        "unigram": SentencePieceTokenizer(str(folder / "unigram.model")),
    }


def grown(tokenizer: Tokenizer, prompt: list[int], new: Sequence[int], stops: Sequence[str]) -> tuple[list[str], Text]:
    """Return the pieces that are shown while these tokens come one by one, and the text that they left."""
    text, pieces, coming = Text([*prompt], torch.Generator(), len(new)), list[str](), iter(new)
    continuation = Continuation(tokenizer, text, stops, pieces.append)
    generate(lambda _: [[next(coming)]], [text], (), lambda row, token: continuation.update())
    assert continuation.finish() == "".join(pieces)
    return pieces, text


def reference(tokenizer: Tokenizer, prompt: list[int], new: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """Return the continuation and its number of tokens from whole texts: of the first tokens that say a stop string."""
    start = len(tokenizer.decode(prompt))
    for count in range(1, len(new) + 1):
        said = tokenizer.decode([*prompt, *new[:count]])[start:]
        if any(stop in said for stop in stops):
            return cut(said, stops), count
    return tokenizer.decode([*prompt, *new])[start:], len(new)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(draw=st.data())
def test_pieces_are_the_text_up_to_the_first_stop_string(
    made: dict[str, Tokenizer], kind: str, draw: st.DataObject
) -> None:
    """Tokens are those of a text, or any: these may be bytes that no character begins with."""
    tokenizer, parts = made[kind], st.text(alphabet=SAID, max_size=30)
    prompt = tokenizer.encode(draw.draw(st.sampled_from(["a", "Größe", "漢 "])))
    any_tokens = st.lists(st.integers(0, min(tokenizer.vocab_size, 256) - 1), max_size=12)
    new = draw.draw(st.one_of(parts.map(tokenizer.encode), st.just(tokenizer.encode(SAID)), any_tokens))
    stops = draw.draw(
        st.lists(st.sampled_from(["STOP", "TO", "o", "€,", "\n", "p, a", "字 🙂", "sto", " "]), max_size=3)
    )
    pieces, text = grown(tokenizer, prompt, new, stops)
    said, num_tokens = reference(tokenizer, prompt, new, stops)
    assert "".join(pieces) == said and len(text.tokens) == len(prompt) + num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_each_piece_has_whole_characters_and_comes_as_early_as_it_can(made: dict[str, Tokenizer], kind: str) -> None:
    pieces, text = grown(made[kind], made[kind].encode("a"), made[kind].encode(SAID), ())
    assert not any(UNFINISHED in piece for piece in pieces)
    most = max(len(made[kind].decode([token])) for token in text.tokens)
    assert max(map(len, pieces)) <= most + 1 and len(pieces) > len(SAID) / most / 2


def test_what_may_begin_a_stop_string_waits() -> None:
    pieces, text = grown(ByteTokenizer(None), [65], [*"é STONE STOP!".encode()], ["STOP", "ONES"])
    assert pieces == ["é", " ", "ST", "ONE "]
    assert text.is_done and ByteTokenizer(None).decode(text.tokens) == "Aé STONE STOP"
    assert grown(ByteTokenizer(None), [65], [*b"STO"], ["STOP"])[0] == ["STO"], "it never came"


def test_stop_strings_of_the_prompt_do_not_count() -> None:
    pieces, _ = grown(ByteTokenizer(None), [*b"STOP S"], [*b"TOP it"], ["STOP"])
    assert "".join(pieces) == "TOP it"


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 300),
    top_k=st.sampled_from([0, 1, 2, 17, 500]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.05, 0.8, 1.0, 3.0]),
)
def test_temperature_top_k_and_top_p_are_composed_as_in_transformers(
    seed: int, size: int, top_k: int, top_p: float, temperature: float
) -> None:
    """Compared with transformers' warpers in its order, in float64."""
    logits_V = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers.extend([TopKLogitsWarper(top_k)] if top_k else [])
    warpers.extend([TopPLogitsWarper(top_p)] if top_p < 1 else [])
    expected_V = warpers(torch.zeros(1, 1, dtype=torch.long), logits_V[None])[0].softmax(-1)
    torch.testing.assert_close(Choice(temperature, top_k, top_p).probabilities(logits_V), expected_V)
