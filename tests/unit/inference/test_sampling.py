"""Fact: logits computed with a KV cache equal those of whole contexts, in float64 and every layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron3d.attention.kv_cache import KVCache
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.inference import sampling
from megatron3d.inference.sampling import Sampler, Text, sample
from megatron3d.model.spec import attention_kind
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.pipeline.schedules import SCHEDULES
from megatron3d.train.state import build_state
from tests.support.turn_ranks import connect, run_turns

TOLERANCE, VOCAB_SIZE, LENGTH = 1e-10, 29, 12
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "num_attention_heads": 8, "hidden_size": 32},
    "llama": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "hidden_size": 32,
        "kv_channels": 4,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "rope_local_base_freq": 100.0,
        "rotary_percent": 0.5,
        "no_rope_freq": (0, 0, 1, 0),
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "attention_softcap": 1.5,
        "softmax_type": "off-by-one",
    },
    "latent": {
        "family": "llama",
        "num_attention_heads": 8,
        "hidden_size": 32,
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 5,
        "attention_output_gate": True,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
    },
}
# Ragged contexts that grow by one or several tokens, one longer than the model's length, one that is another text.
CONTEXTS: list[list[list[int]]] = [
    [[3, 1, 4, 1, 5], [9, 2], [6]],
    [[3, 1, 4, 1, 5, 7], [9, 2, 8], [6, 5]],
    [[3, 1, 4, 1, 5, 7], [9, 2, 8, 1, 1, 2], [6, 5, 5]],
    [[3, 1, 4, 1, 5, 7, 2, 2], [8, 8], [*range(LENGTH)]],
    [[3, 1, 4], [8, 8, 3], [*range(LENGTH + 2)]],
    [[5]],
    [[5, 6, 7, 8]],
]


def executor_of(
    model: dict[str, Any], parallel: dict[str, Any], world_size: int = 1, rank: int = 0
) -> PipelineExecutor:
    given = {"num_layers": 4, "seq_length": LENGTH, "vocab_size": VOCAB_SIZE, "init_method_std": 0.3, **model}
    train = {"precision": "fp64", "micro_batch_size": 8, "global_batch_size": 8 * 8}
    config = Config.model_validate({"model": given, "parallel": parallel, "train": train})
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return build_state(spec, connect(spec), CPU).executor


def whole_logits(executor: PipelineExecutor, context: Sequence[int]) -> Tensor:
    """Return the logits of the whole context at once, on one process."""
    window = list(context[-LENGTH:])
    return executor.logits(torch.tensor([window]), len(window) - 1)[0]


def cached_logits(rank: int, world_size: int, model: dict[str, Any], parallel: dict[str, Any]) -> list[Tensor]:
    """Return the logits that a rank gets with a KV cache."""
    sampler = Sampler(executor_of(model, parallel, world_size, rank), CPU)
    return [sampler.next_logits(contexts) for contexts in CONTEXTS]


def assert_equal(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Require the uncached logits of one process on each of 8 ranks."""
    alone = {str(model): executor_of(model, {}) for model, _ in cases}
    for model, parallel in cases:
        executor = alone[str(model)]
        wanted = [torch.stack([whole_logits(executor, context) for context in contexts]) for contexts in CONTEXTS]
        for steps in run_turns(cached_logits, 8, model, parallel):
            for contexts, logits, expected in zip(CONTEXTS, steps, wanted, strict=True):
                error = (logits - expected).abs().max().item()
                assert error <= TOLERANCE * expected.abs().max().item(), (model, parallel, contexts, error)


def tensor_layouts(size: int) -> list[dict[str, Any]]:
    return [
        {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": entry.default_shape(size)}
        for mode, entry in MODES.items()
        for form in entry.forms
    ]


@pytest.mark.slow
def test_every_mode() -> None:
    *models, latent = [{**model, "num_layers": 2} for model in MODELS.values()]
    layouts = tensor_layouts(8)
    assert_equal([(model, parallel) for parallel in layouts for model in models])
    assert_equal([(latent, layouts[place]) for place in (1, 3, 6, 7, 8)])


@pytest.mark.slow
def test_every_schedule_with_every_mode() -> None:
    names, models = list(SCHEDULES), list(MODELS.values())
    cases = []
    for place, layout in enumerate(tensor_layouts(2)):
        name = names[place % len(names)]
        pipeline = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name, "zero_stage": place % 4}
        cases.append((models[place % len(models)], {**layout, **pipeline}))
    assert_equal(cases)


def test_context_ranks_divide_the_cache() -> None:
    """Prompts that context ranks prefill, and tokens that they decode; the last positions of the model among them."""
    two = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    four = {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    latent = {"context_parallel_size": 2, "tensor_parallel_mode": "3d", "tensor_parallel_shape": (2, 1, 2)}
    cases = [(MODELS["llama"], two), (MODELS["gpt2"], four | {"cp_comm_type": "p2p"}), (MODELS["latent"], latent)]
    assert_equal(cases)


def num_slots(cache: KVCache, window: int | None, length: int, num_ranks: int) -> int:
    """Return the slots of a layer on each context rank for positions below `length`, each of a key and a value."""
    ring, mine = cache.slots_of_ring(window, num_ranks), -(-length // num_ranks)
    if ring is not None:
        return min(-(-(mine + 1) // cache.BLOCK) * cache.BLOCK, ring + 1)
    return min(-(-mine // cache.BLOCK) * cache.BLOCK, max(mine, -(-cache.capacity // num_ranks)))


def cache_bytes(
    rank: int, world_size: int, model: dict[str, Any], parallel: dict[str, Any], length: int = LENGTH
) -> tuple[int, int]:
    """Return what a rank keeps of a prompt, and the closed form of it."""
    executor = executor_of({**model, "seq_length": length}, parallel, world_size, rank)
    sampler = Sampler(executor, CPU)
    sampler.next_logits([[place % VOCAB_SIZE for place in range(length)]])
    arch, ranks = executor.model.arch, executor.model.order.num_ranks
    written = length - 1 + 2 * ranks if ranks > 1 else length  # the pass that decodes the last position is padded
    windows = [attention_kind(arch, layer).window for layer in range(arch.num_layers)]
    slots = sum(num_slots(sampler.cache, window, written, ranks) for window in windows)
    return sampler.cache.num_bytes, 2 * slots * arch.num_query_groups * arch.kv_channels * 8


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_context_rank_keeps_its_part_of_a_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "BLOCK", 1)
    whole, closed_form = cache_bytes(0, 1, MODELS[name], {})
    assert whole == closed_form
    for kept, expected in run_turns(cache_bytes, 4, MODELS[name], {"context_parallel_size": 4}):
        assert kept == expected < whole / 2
    padding = 8  # of the pass that decodes the last position
    assert name == "llama" or whole == LENGTH * kept * 4 // (LENGTH - 1 + padding + 1)


def test_layers_with_a_window_keep_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every token sees itself and 3 before, the cache is the same for prompts of 12 and of 48 tokens."""
    monkeypatch.setattr(KVCache, "BLOCK", 1)
    model = MODELS["llama"] | {"window_attn_skip_freq": None}
    (short, expected), (long, _) = (cache_bytes(0, 1, model, {}, length) for length in (LENGTH, 4 * LENGTH))
    slots = 4 + KVCache.BACK + 1  # of which one is for padding
    assert short == long == expected == 4 * 2 * slots * 2 * 4 * 8


def test_a_ring_goes_back_by_a_position_and_no_further() -> None:
    """A text that goes back further is computed from scratch; without windows nothing is."""
    for name, expected in (("llama", 0), ("gpt2", 8)):
        sampler = Sampler(executor_of(MODELS[name], {}), CPU)
        assert [sampler._start([*range(10)], [*range(end)]) for end in (10, 9, 8)] == [10, 9, expected]


def test_a_prompt_is_prefilled_in_pieces(executor: PipelineExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor grows with the square of the prompt: a pass has at most `PREFILL` tokens of each sequence."""
    monkeypatch.setattr(sampling, "PREFILL", 3)
    widths: list[int] = []
    begin = executor.model.begin_extending

    def watched(tokens: Tensor, *args: Any, **named: Any) -> Any:
        widths.append(tokens.shape[1])
        return begin(tokens, *args, **named)

    monkeypatch.setattr(executor.model, "begin_extending", watched)
    sampler = Sampler(executor, CPU)
    for contexts in CONTEXTS:
        wanted = torch.stack([whole_logits(executor, context) for context in contexts])
        assert (sampler.next_logits(contexts) - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assert max(widths) == 3


@pytest.fixture(scope="module", params=MODELS)
def executor(request: pytest.FixtureRequest) -> PipelineExecutor:
    return executor_of(MODELS[request.param], {})


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_cache_equals_a_full_forward_for_any_context(executor: PipelineExecutor, seed: int) -> None:
    """Contexts grow, shrink, change somewhere, exceed the model's length, in batches of any size."""
    draw = random.Random(seed)
    sampler, contexts = Sampler(executor, CPU), [[0]]
    for _ in range(8):
        if draw.random() < 0.2:
            contexts = [[draw.randrange(VOCAB_SIZE)] for _ in range(draw.randint(1, 4))]
        kept = [context[: draw.choice([None, None, draw.randint(0, len(context))])] for context in contexts]
        contexts = [old + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(not old, 4))] for old in kept]
        wanted = torch.stack([whole_logits(executor, context) for context in contexts])
        got = sampler.next_logits(contexts)
        assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def test_decoding_a_token_computes_one_position(executor: PipelineExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill computes all but the last prompt token without logits; each decode pass has one position."""
    widths: list[tuple[int, bool]] = []
    begin = executor.model.begin_extending

    def watched(tokens: Tensor, *args: Any, **named: Any) -> Any:
        widths.append((tokens.shape[1], named["has_logits"]))
        return begin(tokens, *args, **named)

    monkeypatch.setattr(executor.model, "begin_extending", watched)
    text = Text([1, 2, 3, 4], torch.Generator(), 5)
    sample(Sampler(executor, CPU), [text], lambda logits, _: int(logits.argmax()), ())
    assert widths == [(3, False), *[(1, True)] * 5] and len(text.tokens) == 9


def test_attention_over_whole_blocks_gives_the_same_logits(
    executor: PipelineExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches positions beyond the last token that are attended to."""
    on_gpu = torch.device("meta")
    assert [KVCache(100).attended_length(length, on_gpu) for length in (1, 64, 65)] == [64, 64, 100]
    assert KVCache(100).attended_length(65, CPU) == 65
    monkeypatch.setattr(KVCache, "attended_length", lambda self, length, device: self.capacity)
    sampler = Sampler(executor, CPU)
    for contexts in CONTEXTS[:5]:
        for context, logits in zip(contexts, sampler.next_logits(contexts), strict=True):
            torch.testing.assert_close(logits, whole_logits(executor, context), rtol=0, atol=TOLERANCE)


def test_the_cache_grows_in_blocks() -> None:
    cache = KVCache(capacity=100)
    k = torch.arange(2 * 70 * 3, dtype=torch.float64).view(2, 70, 1, 3)
    for start in range(0, 70, 7):
        positions = torch.arange(start, start + 7).expand(2, -1)
        new = k[:, start : start + 7]
        got_k, got_v = cache.write("layer", new, -new, positions, start + 7)
        assert torch.equal(got_k, k[:, : start + 7]) and torch.equal(got_v, -got_k)
    assert cache.num_bytes == 2 * 2 * 100 * 3 * 8
    with pytest.raises(AssertionError, match="position 100 in a cache of 100"):
        cache.write("layer", k[:, :1], k[:, :1], torch.full((2, 1), 100), 101)
