"""Fact: multi-token prediction behind DeepSeek-V3's and GLM-4.5's layers computes what transformers' modules do:
losses and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import read_settings
from megatron3d.convert.tensor_names import file_tensors
from tests.support.hub_models import HUB_FAMILIES
from tests.support.peers import Outputs, Unchanged, as_ours, check_equal, our_outputs, widened

MODULES, FACTOR = 2, 0.7
TOKENS = torch.randint(37, (2, 13), generator=torch.Generator().manual_seed(3))


def named(model: Any, modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and biases of the choice by their names in files, where modules are layers behind the last."""
    layers, biases = len(model.model.layers), "e_score_correction_bias"
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(value, nn.Parameter) or name.endswith(biases):
            yield name, value
    for k, module in enumerate(modules):
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(value, nn.Parameter) or name.endswith(biases):
                inside = name.replace("post_norm.", "shared_head.norm.", 1) if name.startswith("post_norm") else name
                yield f"model.layers.{layers + k}.{inside.removeprefix('mtp_block.')}", value


def peer_outputs(name: str) -> tuple[Mapping[str, Tensor], Outputs]:
    """Return random weights of transformers' classes, and what they compute: logits, losses, gradients."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling, "MtpModel"):
        pytest.skip("this version of transformers has no modules of multi-token prediction")
    torch.manual_seed(5)
    with widened():
        config = transformers.AutoConfig.for_model(**{**HUB_FAMILIES[name], "num_mtp_layers": MODULES})
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(config, **eager).double().eval()
        modules = modeling.MtpModel(model, MODULES).double().eval().layers
        values = dict(named(model, modules))
        for value in values.values():
            is_param = isinstance(value, nn.Parameter)
            value.data.copy_(torch.randn(value.shape) * 0.3 if is_param else torch.randint(-4, 5, value.shape) / 8)
        x_BSH = model.model(TOKENS[:, :-1], use_cache=False).last_hidden_state
        length = x_BSH.shape[1]
        places = torch.arange(length)[None]
        rotary, mask = model.model.rotary_emb(x_BSH, places), torch.full((length, length), -torch.inf).triu(1)
        logits = model.lm_head(x_BSH)
        losses = [F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())]
        for further, module in enumerate(modules, start=1):
            embedded = model.model.embed_tokens(F.pad(TOKENS[:, further:], (0, further))[:, :-1])
            x_BSH = module(embedded, x_BSH, rotary, mask[None, None], places, None)
            there = model.lm_head(x_BSH[:, :-further])
            losses.append(F.cross_entropy(there.flatten(0, 1), TOKENS[:, 1 + further :].flatten()))
        (losses[0] + FACTOR / MODULES * torch.stack(losses[1:]).sum()).backward()
    gradients = {each: value.grad for each, value in values.items() if value.grad is not None}
    return {each: value.data for each, value in values.items()}, Outputs(
        logits.detach(), torch.stack(losses).detach(), gradients
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_modules_ahead_are_those_of_transformers(name: str) -> None:
    weights, wanted = peer_outputs(name)
    model = read_settings({**HUB_FAMILIES[name], "num_mtp_layers": MODULES})
    table = file_tensors(resolve_architecture(model, 37), name, stacks_experts=True)
    keys = {**model.model_dump(exclude_unset=True), "mtp_loss_scaling_factor": FACTOR}
    params = tuple(tensor for tensor in table if not tensor.is_state)
    num_ahead = [len(TOKENS) * (TOKENS.shape[1] - 1 - further) for further in range(1, MODULES + 1)]
    ours = our_outputs(keys, as_ours(weights, table), TOKENS, Unchanged(), num_ahead)
    check_equal(ours, wanted._replace(gradients=as_ours(wanted.gradients, params)), 1e-9)
