"""The logical tensors in each tensor of a Hugging Face file, by name: one table per model type.

    transformer.h.0.attn.c_attn.weight [H, 3H]  =  (layers.0.attention.q | .k | .v [H, H], along rows)^T

GPT-2's linears are `Conv1D`, y = x W + b, whose W is the transpose of our weight; Llama's weights are like ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megatron3d.model.param_spec import EMBEDDING, HEAD, param_specs
from megatron3d.model.spec import EXPERT_BIAS, Architecture, router_names
from megatron3d.parallel.layout import Box, Shape
from megatron3d.parallel.modes import MODES, build_mode

Modules = Mapping[str, tuple[str, ...]]
LAYER = "model.layers.{n}."


def _rows(text: str, theirs: str = "", ours: str = "") -> dict[str, tuple[str, ...]]:
    """Return the rows of a table with prefixes: their module, and the modules of ours that it concatenates."""
    rows = (row.split() for row in text.replace(";", "\n").splitlines())
    return {theirs + row[0]: tuple(ours + part for part in row[1:]) for row in rows if row}


def _layer(text: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a table of modules of a layer."""
    return _rows(text, LAYER, "layers.{n}.")


def _mlp(theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    return _rows("gate_proj gate; up_proj up; down_proj fc2", f"{LAYER}mlp.{theirs}.", f"layers.{{n}}.mlp.{ours}.")


# A row has a module of Hugging Face, and our modules whose tensors it concatenates, none where a model type lacks it;
# {n} is the layer, {e} the expert.  Marks: * a Conv1D, whose weight is transposed; % rows are those of a first head of
# each part, then of the second heads, ...; = parts are side by side; ~ rows of the parts alternate one by one;
# ! a parameter, not a module.
_GPT2 = _rows("""
    transformer.wte                 embedding
    transformer.wpe                 embedding.position
    transformer.h.{n}.ln_1          layers.{n}.input_norm
    transformer.h.{n}.attn.c_attn*  layers.{n}.attention.q layers.{n}.attention.k layers.{n}.attention.v
    transformer.h.{n}.attn.c_proj*  layers.{n}.attention.proj
    transformer.h.{n}.ln_2          layers.{n}.post_attention_norm
    transformer.h.{n}.mlp.c_fc*     layers.{n}.mlp.up
    transformer.h.{n}.mlp.c_proj*   layers.{n}.mlp.fc2
    transformer.ln_f                final_norm
    lm_head                         head
""")
_LLAMA = {
    "model.embed_tokens": ("embedding",),
    **_layer("""
    input_layernorm           input_norm
    self_attn.q_proj          attention.q
    self_attn.k_proj          attention.k
    self_attn.v_proj          attention.v
    self_attn.o_proj          attention.proj
    post_attention_layernorm  post_attention_norm
    mlp.gate_proj             mlp.gate
    mlp.up_proj               mlp.up
    mlp.down_proj             mlp.fc2
"""),
    "model.norm": ("final_norm",),
    "lm_head": ("head",),
}
_NEOX = _rows("""
    gpt_neox.embed_in                              embedding
    gpt_neox.layers.{n}.input_layernorm            layers.{n}.input_norm
    gpt_neox.layers.{n}.attention.query_key_value% layers.{n}.attention.q layers.{n}.attention.k layers.{n}.attention.v
    gpt_neox.layers.{n}.attention.dense            layers.{n}.attention.proj
    gpt_neox.layers.{n}.post_attention_layernorm   layers.{n}.post_attention_norm
    gpt_neox.layers.{n}.mlp.dense_h_to_4h          layers.{n}.mlp.up
    gpt_neox.layers.{n}.mlp.dense_4h_to_h          layers.{n}.mlp.fc2
    gpt_neox.final_layer_norm                      final_norm
    embed_out                                      head
""")
_HEAD_NORMS = _layer("self_attn.q_norm attention.q_norm; self_attn.k_norm attention.k_norm")
_NORMS_BEHIND_ROPE = _layer("self_attn.query_layernorm attention.q_norm; self_attn.key_layernorm attention.k_norm")
_NO_NORMS = _layer("input_layernorm; post_attention_layernorm")
_OUTPUT_NORMS = _layer("post_attention_layernorm attention_output_norm; post_feedforward_layernorm mlp_output_norm")
_INPUT_NORM_OF_MLP = _layer("pre_feedforward_layernorm post_attention_norm")
_PHI3 = _layer("""
    self_attn.q_proj; self_attn.k_proj; self_attn.v_proj; self_attn.qkv_proj attention.q attention.k attention.v
    mlp.gate_proj; mlp.up_proj; mlp.gate_up_proj mlp.gate mlp.up
""")
_GLM4 = _layer("""
    mlp.gate_proj; mlp.up_proj; mlp.gate_up_proj mlp.gate mlp.up
    post_self_attn_layernorm attention_output_norm; post_mlp_layernorm mlp_output_norm
""")
_LLAMA4 = {
    **dict.fromkeys(_layer("mlp.gate_proj; mlp.up_proj; mlp.down_proj"), ()),
    **_layer("""
    feed_forward.gate_proj               mlp.gate
    feed_forward.up_proj                 mlp.up
    feed_forward.down_proj               mlp.fc2
    feed_forward.router                  mlp.router
    feed_forward.experts.gate_up_proj*   mlp.experts.{e}.gate mlp.experts.{e}.up
    feed_forward.experts.down_proj*      mlp.experts.{e}.fc2
    feed_forward.shared_expert.gate_proj mlp.shared_experts.gate
    feed_forward.shared_expert.up_proj   mlp.shared_experts.up
    feed_forward.shared_expert.down_proj mlp.shared_experts.fc2
"""),
}
_APERTUS = _layer("""
    input_layernorm; post_attention_layernorm; mlp.gate_proj
    attention_layernorm input_norm; feedforward_layernorm post_attention_norm
    mlp.act_fn.alpha_p! mlp.alpha_p; mlp.act_fn.alpha_n! mlp.alpha_n
""")
_STARCODER2 = _layer("mlp.gate_proj; mlp.up_proj; mlp.down_proj; mlp.c_fc mlp.up; mlp.c_proj mlp.fc2")
_EXPERTS = _mlp("experts.{e}", "experts.{e}")
_ROUTER = _layer("mlp.gate mlp.router")
_CHOICE_BIAS = _layer("mlp.gate.e_score_correction_bias! mlp.router.expert_bias")
_SHARED = _mlp("shared_experts", "shared_experts")
_HUNYUAN = _mlp("shared_mlp", "shared_experts") | _layer("mlp.gate.wg mlp.router")
_GATED_SHARED = _mlp("shared_expert", "shared_experts") | _layer("mlp.shared_expert_gate mlp.shared_gate")
_MIXTRAL = _layer("""
    block_sparse_moe.gate            mlp.router
    block_sparse_moe.experts.{e}.w1  mlp.experts.{e}.gate
    block_sparse_moe.experts.{e}.w3  mlp.experts.{e}.up
    block_sparse_moe.experts.{e}.w2  mlp.experts.{e}.fc2
""")
_MINIMAX = _layer("block_sparse_moe.e_score_correction_bias! mlp.router.expert_bias")
_GPT_OSS = _layer("""
    self_attn.sinks!            attention.sinks
    mlp.router                  mlp.router
    mlp.experts.gate_up_proj*~  mlp.experts.{e}.gate mlp.experts.{e}.up
    mlp.experts.down_proj*      mlp.experts.{e}.fc2
""")
# Multi-head latent attention, with a latent of queries or without.
_LATENTS = _layer("""
    self_attn.k_proj; self_attn.v_proj
    self_attn.q_a_proj            attention.q_down
    self_attn.q_a_layernorm       attention.q_norm
    self_attn.q_b_proj            attention.q_up
    self_attn.kv_a_proj_with_mqa  attention.kv_down attention.k_pos
    self_attn.kv_a_layernorm      attention.kv_norm
    self_attn.kv_b_proj%          attention.k_up attention.v_up
""")
# Modules of multi-token prediction, after the last layer: {n} in our names is the module's.
MTP_MODULES = _rows("""
    enorm mtp.{n}.embedding_norm; hnorm mtp.{n}.hidden_norm
    eh_proj= mtp.{n}.embedding_proj mtp.{n}.hidden_proj; shared_head.norm mtp.{n}.final_norm
""")
# Copies of the embedding and of the head that files may hold with these modules.
MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# All experts of a layer in one tensor, in place of one tensor for each expert.
STACKED_EXPERTS: Modules = {
    **_layer("mlp.experts.gate_up_proj mlp.experts.{e}.gate mlp.experts.{e}.up"),
    **_layer("mlp.experts.down_proj mlp.experts.{e}.fc2"),
}


def _modules(*changes: Modules) -> Modules:
    """Return Llama's modules with those that a model type lacks, has in addition, or names otherwise."""
    found: dict[str, tuple[str, ...]] = dict(_LLAMA)
    for change in changes:
        found |= change
    return {theirs: ours for theirs, ours in found.items() if ours}


MODULES: Mapping[str, Modules] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2"), _LLAMA),
    "qwen3": _modules(_HEAD_NORMS),
    "smollm3": _LLAMA,
    "olmo": _modules(_NO_NORMS, {"model.norm": ()}),
    **dict.fromkeys(("olmo2", "olmo3"), _modules(_NO_NORMS, _HEAD_NORMS, _OUTPUT_NORMS)),
    "phi3": _modules(_PHI3),
    "granite": _LLAMA,
    "starcoder2": _modules(_STARCODER2),
    "nemotron": _modules({f"{LAYER}mlp.gate_proj": ()}),
    "gpt_neox": _NEOX,
    "deepseek_v2": _modules(_LATENTS, _ROUTER, _SHARED, _EXPERTS),
    "deepseek_v3": _modules(_LATENTS, _ROUTER, _CHOICE_BIAS, _SHARED, _EXPERTS),
    "glm4_moe": _modules(_HEAD_NORMS, _ROUTER, _CHOICE_BIAS, _SHARED, _EXPERTS),
    "llama4_text": _modules(_LLAMA4),
    "mixtral": _modules(_MIXTRAL),
    "minimax_m2": _modules(_HEAD_NORMS, _MIXTRAL, _MINIMAX),
    "gpt_oss": _modules(_GPT_OSS),
    "qwen2_moe": _modules(_ROUTER, _GATED_SHARED, _EXPERTS),
    **dict.fromkeys(("qwen3_moe", "olmoe"), _modules(_HEAD_NORMS, _ROUTER, _EXPERTS)),
    "glm4": _modules(_GLM4),
    "ernie4_5": _LLAMA,
    "hunyuan_v1_dense": _modules(_NORMS_BEHIND_ROPE),
    "hunyuan_v1_moe": _modules(_NORMS_BEHIND_ROPE, _HUNYUAN, _EXPERTS),
    "apertus": _modules(_HEAD_NORMS, _APERTUS),
    **dict.fromkeys(("cohere", "cohere2"), _modules({f"{LAYER}post_attention_layernorm": ()})),
    "gemma": _LLAMA,
    "gemma2": _modules(_OUTPUT_NORMS, _INPUT_NORM_OF_MLP),
    "gemma3_text": _modules(_HEAD_NORMS, _OUTPUT_NORMS, _INPUT_NORM_OF_MLP),
}


# Numbers in the files of a model type, one of each in every layer, which are the same in all models.
NUMBERS: Mapping[str, Mapping[str, float]] = {
    "apertus": {f"{LAYER}mlp.act_fn.beta": 0.5, f"{LAYER}mlp.act_fn.eps": -1e-6},
}
TIED_HEAD = "lm_head.weight"


class Place(NamedTuple):
    """Where rows of a logical tensor are in a tensor of a file.

    Attributes:
        start, step: first row, and distance between rows.
        column: first column.
        expert: index in the first dim, over experts; -1: there is no such dim.
        is_transposed: rows are columns in the file.
    """

    start: int
    step: int = 1
    column: int = 0
    expert: int = -1
    is_transposed: bool = False


class RowRange(NamedTuple):
    """Consecutive rows of a logical tensor of a shape, and their place in a file's tensor."""

    name: str
    shape: Shape
    low: int
    high: int
    place: Place

    @property
    def box(self) -> Box:
        """The rows as a box of the logical tensor."""
        return ((self.low, self.high), *((0, size) for size in self.shape[1:]))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: logical tensors with their shapes, concatenated along dim 0, then perhaps transposed.

    Attributes:
        num_zeros: length of a vector of zeros, which has no parts: a bias that our model lacks.
        number: value of a single number, which has no parts; None: it is none.
        num_groups: the rows of the parts alternate: with 2 groups a first half of each part, then the second halves.
        num_experts: length of a first dim over experts, with as many parts for each in order; 0: there is none.
        is_striped: the rows of the parts, of each expert, alternate one by one.
        has_columns: the parts are concatenated along dim 1.
    """

    name: str
    parts: tuple[tuple[str, Shape], ...]
    is_transposed: bool
    num_zeros: int = 0
    number: float | None = None
    num_groups: int = 1
    num_experts: int = 0
    is_striped: bool = False
    has_columns: bool = False

    def row_ranges(self) -> Iterator[RowRange]:
        """Yield the rows of every part, in the order of the rows of the tensor before transposition."""
        for expert in range(self.num_experts) if self.num_experts else (-1,):
            parts, start, column = self._parts_of_expert(max(expert, 0)), 0, 0
            step = len(parts) if self.is_striped else 1
            for group, (name, shape) in product(range(self.num_groups), parts):
                rows, rest = divmod(shape[0], self.num_groups)
                assert rest == 0, f"{self.name}: {shape[0]} rows of {name} in {self.num_groups} groups"
                place = Place(start, step, column, expert, self.is_transposed)
                yield RowRange(name, shape, group * rows, (group + 1) * rows, place)
                if self.has_columns:
                    column += shape[1]
                else:
                    start += 1 if self.is_striped else rows

    def _parts_of_expert(self, expert: int) -> tuple[tuple[str, Shape], ...]:
        count = len(self.parts) // (self.num_experts or 1)
        return self.parts[expert * count : (expert + 1) * count]

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a row for each token of the vocabulary."""
        return any(name in (EMBEDDING, HEAD) for name, _ in self.parts)

    @property
    def is_state(self) -> bool:
        """Whether it is state of a router, not a parameter: the bias of its choice."""
        return any(name.endswith(f".{EXPERT_BIAS}") for name, _ in self.parts)

    @property
    def joined_shape(self) -> Shape:
        """Shape before transposition, without the dim over experts."""
        if not self.parts:
            return (self.num_zeros,) if self.number is None else ()
        shapes = [shape for _, shape in self._parts_of_expert(0)]
        if self.has_columns:
            return (shapes[0][0], sum(shape[1] for shape in shapes))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """Shape in the file."""
        shape = self.joined_shape[::-1] if self.is_transposed else self.joined_shape
        return (self.num_experts, *shape) if self.num_experts else shape


def logical_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return the shape of every logical tensor of the model, in the order of the forward pass.

    Biases of routers' choice come last.
    """
    mode = build_mode(next(iter(MODES)), None, (1,))
    shapes = {part.name: part.shape for spec in param_specs(arch, mode).values() for part in spec.parts}
    if arch.experts is None or not arch.experts.has_expert_bias:
        return shapes
    return shapes | {f"{name}.{EXPERT_BIAS}": (arch.experts.num_experts,) for name in router_names(arch)}


def file_tensors(arch: Architecture, model_type: str, stacks_experts: bool = False) -> tuple[FileTensor, ...]:
    """Return the tensors of a model's files, which together hold every logical tensor once.

    `stacks_experts`: those of all experts of a layer are one tensor, as in transformers' classes and few files.
    """
    logical = logical_shapes(arch)
    named = MODULES[model_type]
    if stacks_experts and any("{e}" in theirs for theirs in named):
        kept = {theirs: ours for theirs, ours in named.items() if "{e}" not in theirs}
        whole = {theirs.replace("block_sparse_moe.", "mlp."): ours for theirs, ours in kept.items()}
        named = {**whole, **STACKED_EXPERTS}
    found = tuple(_Table(arch, logical).tensors(named))
    for name, number in NUMBERS.get(model_type, {}).items():
        places = (name.replace("{n}", str(n)) for n in range(arch.num_layers))
        found += tuple(FileTensor(place, (), is_transposed=False, number=number) for place in places)
    held = [part for tensor in found for part, _ in tensor.parts]
    assert sorted(held) == sorted(logical), f"not once: {set(held) ^ set(logical)}"
    return found


@dataclass(frozen=True)
class _Table:
    arch: Architecture
    logical: Mapping[str, Shape]

    def tensors(self, modules: Modules) -> Iterator[FileTensor]:
        inside = {theirs: ours for theirs, ours in modules.items() if "{n}" in theirs}
        position = list(modules).index(next(iter(inside)))
        outside = [item for item in modules.items() if item[0] not in inside]
        for theirs, ours in outside[:position]:
            yield from self.module(theirs, ours)
        for n in range(self.arch.num_layers):
            for theirs, ours in inside.items():
                yield from self.experts(theirs.replace("{n}", str(n)), _each(ours, "{n}", n))
        for k in range(self.arch.mtp_num_layers):
            yield from self.prediction_module(k, inside)
        for theirs, ours in outside[position:]:
            yield from self.module(theirs, ours)

    def prediction_module(self, k: int, inside: Modules) -> Iterator[FileTensor]:
        """Yield the tensors of a module of multi-token prediction, which is a layer after the last one."""
        place = str(self.arch.num_layers + k)
        for theirs, ours in MTP_MODULES.items():
            yield from self.module(f"{LAYER}{theirs}".replace("{n}", place), _each(ours, "{n}", k))
        for theirs, ours in inside.items():
            named = tuple(name.replace("layers.{n}.", f"mtp.{k}.layer.") for name in ours)
            yield from self.experts(theirs.replace("{n}", place), named)

    def experts(self, theirs: str, ours: tuple[str, ...]) -> Iterator[FileTensor]:
        """Yield the tensors of a module of a layer: where `{e}` is in its name, those of each expert."""
        num_experts = self.arch.experts.num_experts if self.arch.experts else 0
        if "{e}" not in ours[0]:
            yield from self.module(theirs, ours)
        elif "{e}" in theirs:
            for e in range(num_experts):
                yield from self.module(theirs.replace("{e}", str(e)), _each(ours, "{e}", e))
        elif num_experts:
            yield from self.stack(theirs, [name for e in range(num_experts) for name in _each(ours, "{e}", e)])

    def stack(self, theirs: str, ours: list[str]) -> Iterator[FileTensor]:
        """Yield weight and bias of all experts, each one tensor, if our layer has them."""
        for suffix, name in (("weight", theirs.rstrip("*~")), ("bias", f"{theirs.rstrip('*~')}_bias")):
            parts = tuple((f"{each}.{suffix}", self.logical.get(f"{each}.{suffix}", ())) for each in ours)
            if parts[0][0] in self.logical:
                is_transposed = "*" in theirs and suffix == "weight"
                count = self.arch.experts.num_experts if self.arch.experts else 0
                yield FileTensor(name, parts, is_transposed, num_experts=count, is_striped="~" in theirs)

    def module(self, theirs: str, ours: tuple[str, ...]) -> Iterator[FileTensor]:
        """Yield weight and bias of a module, if our model has them; the bias of a Conv1D is zero if it has none."""
        is_conv, has_columns = theirs.endswith("*"), theirs.endswith("=")
        num_groups = self.arch.num_attention_heads if theirs.endswith("%") else 1
        theirs, logical = theirs.rstrip("*%="), self.logical
        if ours[0] in logical:  # our bare parameter corresponds to a module, or a bare parameter, of theirs
            name = theirs.removesuffix("!") if theirs.endswith("!") else f"{theirs}.weight"
            yield FileTensor(name, ((ours[0], logical[ours[0]]),), is_transposed=False)
        for suffix in ("weight", "bias"):
            names = [f"{name}.{suffix}" for name in ours]
            if names[0] in logical:
                parts, is_transposed = tuple((name, logical[name]) for name in names), is_conv and suffix == "weight"
                yield FileTensor(
                    f"{theirs}.{suffix}", parts, is_transposed, num_groups=num_groups, has_columns=has_columns
                )
            elif is_conv:
                num_zeros = sum(logical[f"{name}.weight"][0] for name in ours)
                yield FileTensor(f"{theirs}.{suffix}", (), is_transposed=False, num_zeros=num_zeros)


def _each(ours: tuple[str, ...], mark: str, index: int) -> tuple[str, ...]:
    return tuple(name.replace(mark, str(index)) for name in ours)
