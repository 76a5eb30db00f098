"""Slow, obvious reference: GPT-2 from torch's own modules (Radford et al. 2019), layer after layer as in nanoGPT, with
full logits and default torch.optim.AdamW.

Names are GPT-2's (`wte`, `h.0.attn.c_attn`, ...).  Letters: B sequences, S positions, C features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron3d.model.spec import Architecture


class Attention(nn.Module):
    """Causal self-attention over the heads that the projection returns, all of them or a rank's."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_size = arch.kv_channels
        self.c_attn = nn.Linear(arch.hidden_size, 3 * arch.hidden_size)
        self.c_proj = nn.Linear(arch.hidden_size, arch.hidden_size)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = self.c_attn(x_BSC).chunk(3, dim=-1)
        batch, seq = q.shape[:2]
        q, k, v = (t.view(batch, seq, -1, self.head_size).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, seq, -1))
        return out


class MLP(nn.Module):
    """Feed-forward network: four times as wide, GELU, and back."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.c_fc = nn.Linear(arch.hidden_size, arch.ffn_hidden_size)
        self.c_proj = nn.Linear(arch.ffn_hidden_size, arch.hidden_size)

    def forward(self, x_BSC: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x_BSC), approximate="tanh"))
        return out


class Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)
        self.attn = Attention(arch)
        self.ln_2 = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)
        self.mlp = MLP(arch)

    def forward(self, x_BSC: Tensor) -> Tensor:
        x_BSC = x_BSC + self.attn(self.ln_1(x_BSC))
        out: Tensor = x_BSC + self.mlp(self.ln_2(x_BSC))
        return out


class PlainGPT(nn.Module):
    """GPT-2 with a head tied to the word embedding."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.wte = nn.Embedding(arch.padded_vocab_size, arch.hidden_size)
        self.wpe = nn.Embedding(arch.max_position_embeddings, arch.hidden_size)
        self.h = nn.ModuleList(Block(arch) for _ in range(arch.num_layers))
        self.ln_f = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)
        self.lm_head = nn.Linear(arch.hidden_size, arch.padded_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits [B, S, V]."""
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.wte(tokens_BS) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss per token of `tokens` [B, S + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


_NAMES = {
    "embedding.weight": "wte.weight",
    "embedding.position": "wpe.weight",
    "final_norm": "ln_f",
    "layers": "h",
    "input_norm": "ln_1",
    "post_attention_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return megatron3d's full parameters under GPT-2's names, the tied head included."""
    renamed = {}
    for name, value in weights.items():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = value
    return renamed | {"lm_head.weight": renamed["wte.weight"]}
