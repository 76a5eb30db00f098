"""Fact: drafts change neither greedy text, in any layout, nor the distribution of sampled tokens; modules draft with
their caches what they compute without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.inference import sampling as speculation
from megatron3d.inference.sampling import Choice, Draft, Sampler, Speculation, Text, generate, sample, verified
from megatron3d.model.gpt import GPT
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.engine import PipelineExecutor
from tests.support.turn_ranks import run_turns
from tests.unit.inference.test_sampling import CPU, LENGTH, MODELS, VOCAB_SIZE, executor_of

MODULES = 2
LLAMA: dict[str, Any] = {**MODELS["llama"], "num_layers": 2, "mtp_num_layers": MODULES}
LATENT_EXPERTS: dict[str, Any] = {
    **MODELS["latent"],
    "num_layers": 2,
    "mtp_num_layers": MODULES,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_layer_freq": (0, 1),
}
GPT2: dict[str, Any] = {**MODELS["gpt2"], "num_layers": 2, "mtp_num_layers": MODULES}
GREEDY = Choice(0.0)
# Prompts of one token, of several, and one that outgrows the model's length; tokens to add.
PROMPTS, LEFT = [[5], [3, 1, 4, 1, 5, 9, 2, 6], [9, 2]], [6, 7, 3]


def texts() -> list[Text]:
    return [Text(list(p), torch.Generator().manual_seed(n), n) for p, n in zip(PROMPTS, LEFT, strict=True)]


def plain(executor: PipelineExecutor, choice: Choice = GREEDY) -> list[list[int]]:
    found = texts()
    sample(Sampler(executor, CPU), found, choice, ())
    return [text.tokens for text in found]


def speculated(rank: int, world_size: int, model: dict[str, Any], parallel: dict[str, Any]) -> list[list[int]]:
    found, executor = texts(), executor_of(model, parallel, world_size, rank)
    generate(Speculation(Sampler(executor, CPU, keeps_hidden=True), GREEDY, MODULES), found, ())
    return [text.tokens for text in found]


def layouts() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return models and layouts: every form, pipelines, ZeRO 3, context ranks."""
    forms = [(mode, form) for mode, entry in MODES.items() for form in entry.forms]
    found = []
    for place, (mode, form) in enumerate(forms):
        shape = MODES[mode].default_shape(4)
        keys = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
        more = {"pipeline_model_parallel_size": 2} if place % 2 else {"zero_stage": 3}
        found.append(((LLAMA, LATENT_EXPERTS, GPT2)[place % 3], keys | more))
    context = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    return [*found, (LLAMA, context), (LATENT_EXPERTS, context)]


@pytest.mark.parametrize("place", range(len(layouts())))
def test_greedy_text_is_that_without_drafts(place: int) -> None:
    model, parallel = layouts()[place]
    expected = plain(executor_of(model, {}))
    assert run_turns(speculated, 8, model, parallel) == 8 * [expected]


def uncached_drafts(model: GPT, executor: PipelineExecutor, context: list[int]) -> list[int]:
    """Return the drafts after a context, each module computed from all of it."""
    sampler, drafts, x_MH = Sampler(executor, CPU, keeps_hidden=True), list[int](), None
    sampler.prefill([context])
    for depth in range(MODULES):
        rows = [[*context, *drafts][depth + 1 :]]
        x_MH, logits = executor.draft(depth, x_MH, sampler.begin(rows, [0], has_logits=True), [len(context) - 2])
        assert logits is not None
        drafts.append(int(logits[0].argmax()))
    return drafts


class Watched(Speculation):
    """Records the drafts after each text."""

    def __init__(self, sampler: Sampler, choice: Choice, num_drafts: int) -> None:
        super().__init__(sampler, choice, num_drafts)
        self.drafted: list[tuple[list[int], list[int]]] = []

    def _draft(self, texts: Any, limits: Any) -> list[list[Draft]]:
        found = super()._draft(texts, limits)
        self.drafted.extend((list(t.tokens), [d.token for d in row]) for t, row in zip(texts, found, strict=True))
        return found


@pytest.mark.parametrize("model", [LLAMA, LATENT_EXPERTS], ids=["llama", "latent"])
@pytest.mark.parametrize("prefill", [1024, 3])
def test_modules_draft_from_their_caches_what_they_draft_without(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], prefill: int
) -> None:
    """As many drafts are accepted as a pattern says."""
    monkeypatch.setattr(speculation, "PREFILL", prefill)
    executor = executor_of(model, {})
    counts = iter([0, 2, 1, 1, 2, 0, 0, 2] * 3)

    def pretend(logits: list[Tensor], drafts: list[Draft], *_: Any) -> list[int]:
        return [draft.token for draft in drafts[: next(counts)]] + [int(logits[0].argmax())]

    monkeypatch.setattr(speculation, "verified", pretend)
    drafting = Watched(Sampler(executor, CPU, keeps_hidden=True), GREEDY, MODULES)
    generate(drafting, [Text([3, 1], torch.Generator(), 9), Text([7, 7, 2, 1], torch.Generator(), 7)], ())
    assert len(drafting.drafted) >= 6
    for context, drafts in drafting.drafted:
        assert drafts == uncached_drafts(executor.model, executor, context)[: len(drafts)], context


def exact(p: list[Tensor], qs: list[Tensor], choice: Choice) -> dict[tuple[int, int], float]:
    """Return the probability of the first two tokens by enumeration of drafts and of the draws that accept them."""
    ps = [choice.probabilities(logits) for logits in p]
    found: dict[tuple[int, int], float] = {}
    for a, q_a in enumerate(qs[0].tolist()):
        take = min(1.0, ps[0][a].item() / q_a) if q_a else 0.0
        for b, more in enumerate(ps[1].tolist()):
            found[a, b] = found.get((a, b), 0.0) + q_a * take * more
        rest = (ps[0] - qs[0]).clamp(min=0)
        for other, share in enumerate((rest / rest.sum()).tolist() if rest.any() else []):
            for b, more in enumerate(ps[1].tolist()):
                found[other, b] = found.get((other, b), 0.0) + q_a * (1 - take) * share * more
    return found


@pytest.mark.parametrize("choice", [Choice(1.0), Choice(0.7, 3), GREEDY], ids=str)
def test_accepted_and_redrawn_tokens_have_the_distribution_of_the_model(choice: Choice) -> None:
    """By enumeration, and the enumeration by many draws of `verified` itself."""
    gen = torch.Generator().manual_seed(7)
    p = [torch.randn(4, generator=gen, dtype=torch.float64) for _ in range(2)]
    q_V = choice.probabilities(torch.randn(4, generator=gen, dtype=torch.float64))
    wanted = choice.probabilities(p[0])
    found = exact(p, [q_V], choice)
    for a in range(4):
        assert abs(sum(found[a, b] for b in range(4)) - wanted[a].item()) < 1e-12
    count = 4000
    firsts = torch.zeros(4, dtype=torch.float64)
    for _ in range(count):
        token = int(torch.multinomial(q_V, 1, generator=gen))
        firsts[verified(p, [Draft(token, q_V)], choice, gen)[0]] += 1 / count
    assert (firsts - wanted).abs().max() < 4 * (0.25 / count) ** 0.5


def test_equal_distributions_accept_every_draft() -> None:
    executor = executor_of({**LLAMA, "init_method_std": 1e-9}, {})  # uniform logits of model and modules
    drafting = Speculation(Sampler(executor, CPU, keeps_hidden=True), Choice(1.0), MODULES)
    found = [Text([1, 2, 3], torch.Generator().manual_seed(1), LENGTH - 3)]
    generate(drafting, found, ())
    assert len(found[0].tokens) == LENGTH and max(found[0].tokens) < VOCAB_SIZE
    assert drafting.num_accepted == drafting.num_proposed == 6
    assert drafting.report() == "drafts: 6 of 6 tokens accepted (100.0%)"
