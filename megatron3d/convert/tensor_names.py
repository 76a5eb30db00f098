"""The logical tensors in each tensor of a Hugging Face file, by name: one table per model type.

    transformer.h.0.attn.c_attn.weight [H, 3H]  =  (layers.0.attention.q | .k | .v [H, H], concatenated along rows)^T

GPT-2's linears are `Conv1D`, y = x W + b, whose W is the transpose of our weight; Llama's weights are like ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron3d.convert.model_types import MODEL_TYPES
from megatron3d.model.architecture import Architecture
from megatron3d.model.params import EMBEDDING, HEAD, param_specs
from megatron3d.parallel.layout import Box, Shape
from megatron3d.parallel.modes import MODES, build_mode

# Hugging Face module: our modules whose tensors it concatenates; {n} is the layer; * marks a Conv1D, and % one whose
# rows are those of a first head of each part, then of the second heads, ...
_GPT2 = {
    "transformer.wte": ("embedding",),
    "transformer.wpe": ("embedding.position",),
    "transformer.h.{n}.ln_1": ("layers.{n}.input_norm",),
    "transformer.h.{n}.attn.c_attn*": ("layers.{n}.attention.q", "layers.{n}.attention.k", "layers.{n}.attention.v"),
    "transformer.h.{n}.attn.c_proj*": ("layers.{n}.attention.proj",),
    "transformer.h.{n}.ln_2": ("layers.{n}.post_attention_norm",),
    "transformer.h.{n}.mlp.c_fc*": ("layers.{n}.mlp.up",),
    "transformer.h.{n}.mlp.c_proj*": ("layers.{n}.mlp.fc2",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("head",),
}
_LLAMA = {
    "model.embed_tokens": ("embedding",),
    "model.layers.{n}.input_layernorm": ("layers.{n}.input_norm",),
    "model.layers.{n}.self_attn.q_proj": ("layers.{n}.attention.q",),
    "model.layers.{n}.self_attn.k_proj": ("layers.{n}.attention.k",),
    "model.layers.{n}.self_attn.v_proj": ("layers.{n}.attention.v",),
    "model.layers.{n}.self_attn.o_proj": ("layers.{n}.attention.proj",),
    "model.layers.{n}.post_attention_layernorm": ("layers.{n}.post_attention_norm",),
    "model.layers.{n}.mlp.gate_proj": ("layers.{n}.mlp.gate",),
    "model.layers.{n}.mlp.up_proj": ("layers.{n}.mlp.up",),
    "model.layers.{n}.mlp.down_proj": ("layers.{n}.mlp.fc2",),
    "model.norm": ("final_norm",),
    "lm_head": ("head",),
}
_NEOX = {
    "gpt_neox.embed_in": ("embedding",),
    "gpt_neox.layers.{n}.input_layernorm": ("layers.{n}.input_norm",),
    "gpt_neox.layers.{n}.attention.query_key_value%": tuple(f"layers.{{n}}.attention.{part}" for part in "qkv"),
    "gpt_neox.layers.{n}.attention.dense": ("layers.{n}.attention.proj",),
    "gpt_neox.layers.{n}.post_attention_layernorm": ("layers.{n}.post_attention_norm",),
    "gpt_neox.layers.{n}.mlp.dense_h_to_4h": ("layers.{n}.mlp.up",),
    "gpt_neox.layers.{n}.mlp.dense_4h_to_h": ("layers.{n}.mlp.fc2",),
    "gpt_neox.final_layer_norm": ("final_norm",),
    "embed_out": ("head",),
}
_HEAD_NORMS = {
    "model.layers.{n}.self_attn.q_norm": ("layers.{n}.attention.q_norm",),
    "model.layers.{n}.self_attn.k_norm": ("layers.{n}.attention.k_norm",),
}
_LAYER = "model.layers.{n}."
_NO_NORMS = {f"{_LAYER}input_layernorm": None, f"{_LAYER}post_attention_layernorm": None}
_OUTPUT_NORMS = {
    f"{_LAYER}post_attention_layernorm": ("layers.{n}.attention_output_norm",),
    f"{_LAYER}post_feedforward_layernorm": ("layers.{n}.mlp_output_norm",),
}
_INPUT_NORM_OF_MLP = {f"{_LAYER}pre_feedforward_layernorm": ("layers.{n}.post_attention_norm",)}
_FUSED_ATTENTION = {f"{_LAYER}self_attn.{part}_proj": None for part in "qkv"} | {
    f"{_LAYER}self_attn.qkv_proj": tuple(f"layers.{{n}}.attention.{part}" for part in "qkv")
}


def _modules(*changes: Mapping[str, tuple[str, ...] | None]) -> dict[str, tuple[str, ...]]:
    """Return Llama's modules with those that a model type lacks (None), has in addition, or names otherwise."""
    found: dict[str, tuple[str, ...] | None] = dict(_LLAMA)
    for change in changes:
        found |= change
    return {theirs: ours for theirs, ours in found.items() if ours is not None}


_NO_GATE: Mapping[str, None] = {f"{_LAYER}mlp.gate_proj": None}
_MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _modules(_HEAD_NORMS),
    "smollm3": _LLAMA,
    "olmo": _modules(_NO_NORMS, {"model.norm": None}),
    "olmo2": _modules(_NO_NORMS, _HEAD_NORMS, _OUTPUT_NORMS),
    "olmo3": _modules(_NO_NORMS, _HEAD_NORMS, _OUTPUT_NORMS),
    "phi3": _modules(
        _FUSED_ATTENTION,
        {
            f"{_LAYER}mlp.gate_proj": None,
            f"{_LAYER}mlp.up_proj": None,
            f"{_LAYER}mlp.gate_up_proj": ("layers.{n}.mlp.gate", "layers.{n}.mlp.up"),
        },
    ),
    "granite": _LLAMA,
    "starcoder2": _modules(
        _NO_GATE,
        {
            f"{_LAYER}mlp.up_proj": None,
            f"{_LAYER}mlp.down_proj": None,
            f"{_LAYER}mlp.c_fc": ("layers.{n}.mlp.up",),
            f"{_LAYER}mlp.c_proj": ("layers.{n}.mlp.fc2",),
        },
    ),
    "nemotron": _modules(_NO_GATE),
    "gpt_neox": _NEOX,
    "gemma": _LLAMA,
    "gemma2": _modules(_OUTPUT_NORMS, _INPUT_NORM_OF_MLP),
    "gemma3_text": _modules(
        _HEAD_NORMS,
        _OUTPUT_NORMS,
        _INPUT_NORM_OF_MLP,
    ),
}
TIED_HEAD = "lm_head.weight"


class RowRange(NamedTuple):
    """Consecutive rows of a logical tensor that are consecutive in a file's tensor, where they begin at row `start`.

    Attributes:
        shape: shape of the logical tensor.
    """

    name: str
    shape: Shape
    low: int
    high: int
    start: int

    @property
    def box(self) -> Box:
        """The rows as a box of the logical tensor."""
        return ((self.low, self.high), *((0, size) for size in self.shape[1:]))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: logical tensors with their shapes, concatenated along dim 0, then perhaps transposed.

    Attributes:
        num_zeros: length of a vector of zeros, which has no parts: a bias that our model lacks.
        num_groups: the rows of the parts alternate: with 2 groups a first half of each part, then the second halves.
    """

    name: str
    parts: tuple[tuple[str, Shape], ...]
    is_transposed: bool
    num_zeros: int = 0
    num_groups: int = 1

    def row_ranges(self) -> Iterator[RowRange]:
        """Yield the rows of every part, in the order of the rows of the tensor before transposition."""
        start = 0
        for group in range(self.num_groups):
            for name, shape in self.parts:
                rows, rest = divmod(shape[0], self.num_groups)
                assert rest == 0, f"{self.name}: {shape[0]} rows of {name} in {self.num_groups} groups"
                yield RowRange(name, shape, group * rows, (group + 1) * rows, start)
                start += rows

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a row for each token of the vocabulary."""
        return any(name in (EMBEDDING, HEAD) for name, _ in self.parts)

    @property
    def joined_shape(self) -> Shape:
        """Shape before transposition."""
        if not self.parts:
            return (self.num_zeros,)
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    @property
    def shape(self) -> Shape:
        """Shape in the file."""
        return self.joined_shape[::-1] if self.is_transposed else self.joined_shape


def logical_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return the shape of every logical tensor of the model, in the order of the forward pass."""
    mode = build_mode(next(iter(MODES)), None, (1,))
    return {part.name: part.shape for spec in param_specs(arch, mode).values() for part in spec.parts}


def file_tensors(arch: Architecture, model_type: str) -> tuple[FileTensor, ...]:
    """Return the tensors of a model's files, which together hold every logical tensor once."""
    logical = logical_shapes(arch)
    found = tuple(_tensors(_MODULES[model_type], arch, logical))
    held = [part for tensor in found for part, _ in tensor.parts]
    assert sorted(held) == sorted(logical), f"not once: {set(held) ^ set(logical)}"
    return found


def _tensors(
    modules: Mapping[str, tuple[str, ...]], arch: Architecture, logical: Mapping[str, Shape]
) -> Iterator[FileTensor]:
    inside = {theirs: ours for theirs, ours in modules.items() if "{n}" in theirs}
    position = list(modules).index(next(iter(inside)))
    outside = [item for item in modules.items() if item[0] not in inside]
    for theirs, ours in outside[:position]:
        yield from _module(theirs, ours, arch, logical)
    for n in range(arch.num_layers):
        for theirs, ours in inside.items():
            yield from _module(theirs.format(n=n), tuple(name.format(n=n) for name in ours), arch, logical)
    for theirs, ours in outside[position:]:
        yield from _module(theirs, ours, arch, logical)


def _module(
    theirs: str, ours: tuple[str, ...], arch: Architecture, logical: Mapping[str, Shape]
) -> Iterator[FileTensor]:
    """Yield weight and bias of a module, if our model has them; the bias of a Conv1D is zero if it has none."""
    is_conv, num_groups = theirs.endswith("*"), arch.num_attention_heads if theirs.endswith("%") else 1
    theirs = theirs.rstrip("*%")
    if ours[0] in logical:  # our bare parameter corresponds to a module in the Hugging Face model
        yield FileTensor(f"{theirs}.weight", ((ours[0], logical[ours[0]]),), is_transposed=False)
    for suffix in ("weight", "bias"):
        names = [f"{name}.{suffix}" for name in ours]
        if names[0] in logical:
            parts = tuple((name, logical[name]) for name in names)
            yield FileTensor(f"{theirs}.{suffix}", parts, is_conv and suffix == "weight", num_groups=num_groups)
        elif is_conv:
            num_zeros = sum(logical[f"{name}.weight"][0] for name in ours)
            yield FileTensor(f"{theirs}.{suffix}", (), is_transposed=False, num_zeros=num_zeros)


def strip_body_prefix(name: str, model_type: str) -> str:
    """Return the tensor's name in files of a model without head, such as those of the first GPT-2 models."""
    return name.removeprefix(MODEL_TYPES[model_type].body)
