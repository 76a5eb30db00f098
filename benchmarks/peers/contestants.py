"""Contestants of one process: each starts from the same weights and has a `step(tokens) -> loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from common.shapes import LR, Ours, Size
from peers.plain_gpt import PlainGPT, gpt2_weights, plain_loss
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]
Weights = Mapping[str, Tensor]


def ours(size: Size, precision: str) -> Step:
    """Return megatron3d's step: fp32, or bf16 with fp32 master weights and main_grad."""
    return Ours(size, size.config(precision)).step


def plain(size: Size, precision: str, fused: bool = False) -> Step:
    """Return the step of the plain GPT: fp32, or bf16 by autocast over fp32 weights."""
    config = size.config(precision)
    model = PlainGPT(size.spec(config).arch)
    model.load_state_dict(gpt2_weights(_initial_weights(size)))
    return peer_step(model, plain_loss, precision, fused)


def hugging_face(size: Size, precision: str) -> Step:
    """Return the step of transformers' GPT2LMHeadModel with torch's attention and GELU, without a KV cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.seq_length,
        n_embd=size.hidden_size,
        n_layer=size.num_layers,
        n_head=size.num_attention_heads,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(settings).train()
    assert model.config._attn_implementation == "sdpa", "transformers no longer prefers torch's attention"
    model.loss_type = "ForCausalLM"
    _load(model, gpt2_weights(_initial_weights(size)))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        labels = tokens[:, 1:].contiguous()
        out: Tensor = model(tokens[:, :-1], labels=labels, shift_labels=labels).loss
        return out

    return peer_step(model, loss, precision, fused=False)


CONTESTANTS: Mapping[str, Callable[[Size, str], Step]] = {
    "megatron3d": ours,
    "plain": plain,
    "hugging face": hugging_face,
    "plain, fused AdamW": partial(plain, fused=True),
}


def peer_step(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], precision: str, fused: bool) -> Step:
    """Return a step of forward, backward, clipping and AdamW, as tutorials have it."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused or None)

    def step(tokens: Tensor) -> Tensor:
        with _autocast(precision, tokens.device.type):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _autocast(precision: str, device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()


def _initial_weights(size: Size) -> Weights:
    return Ours(size, size.config("fp32")).weights()


def _load(model: nn.Module, weights: Weights) -> None:
    """Copy GPT-2's weights into Hugging Face's module, which stores most matrices transposed."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = weights[name.removeprefix("transformer.")]
            param.copy_(value if value.shape == param.shape and not _is_conv1d(name) else value.T)


def _is_conv1d(name: str) -> bool:
    return ".c_" in name and name.endswith("weight")
