"""What lies between forward and backward of a microbatch on one rank: every tensor that is kept, each storage once.

    layer   norm | qkv | rotary, attention | proj | dropout | norm | fc1 | activation | fc2 | dropout

Shards are kept, never gathered operands (`ops/matmul.py`), so each size follows from the residual or the inner layout.
What is a view of something kept, such as v of qkv's output, costs nothing more.  Compare Korthikanti et al. 2022
(arXiv:2205.05198, section 4); docs/memory.md has both side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron3d.analysis.memory_model.local_sizes import Work
from megatron3d.model.recompute_spec import CORE_ATTN, KEEP_ALL, MLP_ACT, Run

_INDEX = 8


class Item(NamedTuple):
    """A tensor that is kept: the module that needs it in backward, which of its tensors, and its bytes."""

    site: str
    what: str
    num_bytes: int


def total(items: tuple[Item, ...]) -> int:
    """Bytes of all items."""
    return sum(item.num_bytes for item in items)


def layer_activations(work: Work) -> tuple[Item, ...]:
    """Of a transformer layer that is not computed again as a whole, though modules of it may be."""
    return tuple(_layer(work))


def run_activations(work: Work, run: Run) -> int:
    """Bytes of a run of layers; of those computed again the first one's input, of those offloaded nothing here."""
    if run.is_offloaded or not run.layers:
        return 0
    return work.residual if run.is_repeated else len(run.layers) * total(layer_activations(work))


def recomputed_activations(work: Work) -> int:
    """Most bytes that layers do not keep, and that exist while their backward runs."""
    everything = total(layer_activations(replace(work, recompute=KEEP_ALL)))
    runs = work.recompute.runs(range(work.arch.num_layers))
    longest = max((len(run.layers) for run in runs if run.is_repeated), default=0)
    again = longest * everything - work.residual if longest else everything - total(layer_activations(work))
    return max(again, everything if work.recompute.offloads else 0)


def embedding_activations(work: Work) -> tuple[Item, ...]:
    """Of the embedding: which rows were looked up, and the mask of its dropout."""
    plan = work.mode.embed.on(work.mesh)
    read = work.part(work.num_tokens, plan.m)
    is_plain = not (plan.m or plan.k or plan.n) and work.itemsize == work.wide
    items = [Item("embedding", "rows", read * (_INDEX if is_plain else _INDEX + 1))]
    if work.arch.position_embedding_type == "learned_absolute" and not work.begins_anew:  # else a view of what is there
        items.append(Item("embedding", "positions", work.tokens * _INDEX))
    return (*items, *_mask(work, "embedding_dropout"))


def head_activations(work: Work) -> tuple[Item, ...]:
    """Of the last norm, and of the head, which computes its gradients in forward: that of its input waits."""
    dx = Item("head", "gradient of its input", work.residual)
    return (*_norm(work, "final_norm", work.tokens, work.hidden, work.splits_features), dx)


def rotary_tables(work: Work) -> tuple[Item, ...]:
    """cos and sin, which all layers of a rank share."""
    if work.arch.position_embedding_type != "rope":
        return ()
    return (Item("rotary", "cos and sin", 2 * work.arch.seq_length * work.arch.kv_channels * work.itemsize),)


def document_activations(work: Work) -> tuple[Item, ...]:
    """What all layers of a stage share of documents in a microbatch: who sees whom [S, S], and rotary tables."""
    tokens, is_rope = work.sequences_read * work.arch.seq_length, work.arch.position_embedding_type == "rope"
    items = []
    if work.keeps_apart and (not work.arch.attention_dropout or work.recompute != KEEP_ALL):
        items.append(Item("documents", "mask", tokens * work.arch.seq_length * work.itemsize))
    if work.begins_anew and is_rope:
        items.append(Item("documents", "cos and sin", 2 * tokens * work.arch.kv_channels * work.itemsize))
    return tuple(items)


def put_off_activations(work: Work) -> int:
    """Bytes of a layer between the two halves of a split backward: input and output's gradient of every matmul."""
    up, down = (plan.on(work.mesh) for plan in (work.mode.expand, work.mode.contract))
    gates = 2 if work.is_gated else 1
    queries = work.num_queries * work.arch.kv_channels
    outputs = work.inner(queries + 2 * work.keys_width + gates * work.ffn) * work.mesh.size(up.dy)
    inputs = work.inner(queries + work.ffn)
    return 2 * work.residual + outputs + inputs + 2 * work.residual * work.mesh.size(down.dy)


def _layer(work: Work) -> Iterator[Item]:
    rows, width, split = work.tokens, work.hidden, work.splits_features
    core = _recomputed_core if work.recompute.repeats(CORE_ATTN) else _core
    activation = _recomputed_activation if work.recompute.repeats(MLP_ACT) else _ACTIVATIONS[work.arch.activation]
    yield from _norm(work, "input_norm", rows, width, split)
    yield Item("attention.qkv", "input", work.residual)
    yield from core(work)
    yield Item("attention.proj", "input", work.inner(work.num_queries * work.arch.kv_channels))
    yield from _mask(work, "attention_dropout")
    yield from _norm(work, "post_attention_norm", rows, width, split)
    yield Item("mlp.fc1", "input", work.residual)
    yield from activation(work)
    yield from _mask(work, "mlp_dropout")


def _mask(work: Work, site: str) -> Iterator[Item]:
    if work.arch.hidden_dropout:
        yield Item(site, "mask", work.tokens * work.hidden)


def _norm(work: Work, site: str, rows: int, width: int, split: bool) -> Iterator[Item]:
    """A norm's input and what it remembers of it; its output is its reader's."""
    composed = work.arch.normalization == "RMSNorm" and not work.kernels.fused_rms_norm and not split
    if not composed or work.itemsize == work.wide:
        yield Item(site, "input", rows * width * work.itemsize)
    yield from _statistics(work, site, rows, width, split)


def _statistics(work: Work, site: str, rows: int, width: int, split: bool) -> Iterator[Item]:
    is_layer_norm = work.arch.normalization == "LayerNorm"
    if split:
        yield Item(site, "mean and scale", 2 * rows * work.wide)
    elif is_layer_norm:
        yield Item(site, "mean and scale", 2 * rows * (work.itemsize if work.kernels.narrow_statistics else work.wide))
    else:
        yield Item(site, "scale", rows * work.wide)
        if not work.kernels.fused_rms_norm:
            copies = 1 if work.itemsize == work.wide else 2
            yield Item(site, "input scaled, and widened", copies * rows * width * work.wide)


def _core(work: Work) -> Iterator[Item]:
    """From qkv's output to attention's, by scaled_dot_product_attention or, with dropout, written out."""
    kept: dict[tuple[str, str], Item] = {}
    last = {}
    for name, count in (("q", work.num_queries), ("k", work.num_groups), ("v", work.num_groups)):
        *before, last[name] = _path(work, name, count)
        kept |= {item[:2]: item for item in before}
    attend = _written_out if work.arch.attention_dropout else _fused
    kept |= {item[:2]: item for item in attend(work, last)}
    yield from kept.values()


def _recomputed_core(work: Work) -> Iterator[Item]:
    yield _qkv_output(work)


def _qkv_output(work: Work) -> Item:
    queries = work.num_queries * work.arch.kv_channels
    return Item("attention.qkv", "output", work.inner(queries + 2 * work.keys_width))


def _path(work: Work, name: str, count: int) -> Iterator[Item]:
    """What keeps q, k or v on its way from qkv's output to attention, and last of all what attention reads."""
    site, width = "attention.core", work.arch.kv_channels
    here = _qkv_output(work)
    if name != "q" and work.heads.gather_axes:
        gathered = work.inner(work.keys_width) * work.mesh.size(work.heads.gather_axes)
        here = Item(site, f"{name} gathered", gathered)
    if name != "v" and work.arch.qk_layernorm:
        norm = f"attention.{name}_norm"
        inputs = list(_norm(work, norm, work.inner_tokens * count, width, split=False))
        statistics = list(_statistics(work, norm, work.inner_tokens * count, width, split=False))
        yield from statistics if len(inputs) == len(statistics) else [here, *statistics]
        here = Item(site, f"{name} normed", work.inner(count * width))
    if name != "v" and work.arch.position_embedding_type == "rope":
        here = Item(site, f"{name} rotated", work.inner(count * width))
    if name != "q" and not work.heads.are_even:
        yield Item(site, f"head of each {name}", work.num_queries * _INDEX)
        here = Item(site, f"{name} for each head", work.inner(work.num_queries * width))
    yield here


def _fused(work: Work, last: Mapping[str, Item]) -> Iterator[Item]:
    """scaled_dot_product_attention keeps what it reads, its output (proj's input) and a number per row of scores."""
    yield from last.values()
    yield Item("attention.core", "logsumexp", work.inner_tokens * work.num_queries * work.wide)


def _written_out(work: Work, last: Mapping[str, Item]) -> Iterator[Item]:
    """Copies of q, k and v by head, the scores after softmax, the mask and what it leaves: [heads, S, S] each."""
    site, seq = "attention.core", work.arch.seq_length
    scores = work.inner_tokens * work.num_queries * seq
    by_head = work.inner(work.num_queries * work.arch.kv_channels)
    is_copied = work.sequences > 1 and work.num_queries > 1
    yield Item(site, "q by head", by_head) if is_copied else last["q"]
    yield Item(site, "k and v by head", 2 * by_head)
    if not work.keeps_apart:
        yield Item(site, "which positions are later", seq * seq)
    yield Item(site, "softmax", scores * work.wide)
    yield Item(site, "dropout mask", scores)
    yield Item(site, "softmax after dropout", scores * work.itemsize)


def _input_and_output(work: Work) -> Iterator[Item]:
    yield Item("mlp.activation", "input", work.inner(work.ffn))
    yield Item("mlp.fc2", "input", work.inner(work.ffn))


def _output_only(work: Work) -> Iterator[Item]:
    """fc2's input as well."""
    yield Item("mlp.activation", "output", work.inner(work.ffn))


def _gated(work: Work) -> Iterator[Item]:
    yield Item("mlp.activation", "gate and up", work.inner(2 * work.ffn))
    yield Item("mlp.activation", "gate activated", work.inner(work.ffn))
    yield Item("mlp.fc2", "input", work.inner(work.ffn))


def _recomputed_activation(work: Work) -> Iterator[Item]:
    """What the activation reads, and what its own gradient needs beside."""
    yield Item("mlp.fc1", "output", work.inner((2 if work.is_gated else 1) * work.ffn))
    yield from (item for item in _ACTIVATIONS[work.arch.activation](work) if item.what in _OWN)


# What an activation keeps of its own making; relu its result.
_OWN = {"gate activated", "output"}

# Which of them a rule of differentiation reads: relu's its output, the others' their input.
_ACTIVATIONS: Mapping[str, Callable[[Work], Iterator[Item]]] = {
    "gelu": _input_and_output,
    "gelu_tanh": _input_and_output,
    "relu": _output_only,
    "swiglu": _gated,
    "geglu": _gated,
}
