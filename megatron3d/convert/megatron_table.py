"""Tensors and arguments of Megatron-LM: tables from which both directions of conversion follow.

    decoder.layers.self_attention.linear_qkv.weight [L, Q + 2K, H]  =  rows of q, k and v of a first query group, then
                                                                       of the second group, ..., for each layer
    --num-layers 12, in common.pt num_layers = 12                      model.num_layers = 12

Layers have a tensor each where they are not all alike, `decoder.layers.0...`, and experts may too.  Names, shapes and
arguments are those of megatron-core 0.7 to 0.16 and of the Megatron-LM that comes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pydantic import JsonValue

from megatron3d.attention.rotary_spec import LLAMA3
from megatron3d.convert.fields import AllowedValues, show
from megatron3d.convert.tensor_names import FileTensor, logical_shapes
from megatron3d.errors import UserError
from megatron3d.model.spec import Architecture, has_experts
from megatron3d.parallel.layout import Shape


class Slot(NamedTuple):
    """A tensor of a checkpoint, or one entry of its first dims: for each, the entry's index and their number."""

    name: str
    entry: tuple[tuple[int, int], ...] = ()


# Where a tensor is: whole in one slot, or with its first half of rows in one and the others in a second.
Form = tuple[Slot, ...]


@dataclass(frozen=True)
class MegatronTensor:
    """Our logical tensors as Megatron-LM concatenates them, and the forms in which a checkpoint may hold them.

    The first form is the one that is written.
    """

    tensor: FileTensor
    forms: tuple[Form, ...]


def _rows(text: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    rows = [row.split() for row in text.splitlines() if row.split()]
    return {tuple(row[0].split("|")): tuple(row[1:]) for row in rows}


# A row has the start of names of theirs, or several that mean the same, to which `weight` or `bias` is added, and our
# modules.  In a layer they follow `decoder.layers.`, and `layers.N.`; {e} is the expert.
_FIRST = _rows("""
    embedding.word_embeddings.      embedding
    embedding.position_embeddings.  embedding.position
""")
_LAYER = _rows("""
    self_attention.linear_qkv.layer_norm_|input_layernorm.  input_norm
    self_attention.linear_qkv.                              attention.q attention.k attention.v
    self_attention.q_layernorm.                             attention.q_norm
    self_attention.k_layernorm.                             attention.k_norm
    self_attention.linear_proj.                             attention.proj
    mlp.linear_fc1.layer_norm_|pre_mlp_layernorm.           post_attention_norm
    mlp.linear_fc1.                                         mlp.gate mlp.up
    mlp.linear_fc2.                                         mlp.fc2
    mlp.router.                                             mlp.router
    mlp.router.expert_                                      mlp.router.expert_bias
    mlp.shared_experts.linear_fc1.                          mlp.shared_experts.gate mlp.shared_experts.up
    mlp.shared_experts.linear_fc2.                          mlp.shared_experts.fc2
    mlp.shared_experts.gate_                                mlp.shared_gate
    mlp.experts.experts.linear_fc1.                         mlp.experts.{e}.gate mlp.experts.{e}.up
    mlp.experts.experts.linear_fc2.                         mlp.experts.{e}.fc2
""")
_LAST = _rows("""
    decoder.final_layernorm.  final_norm
    output_layer.             head
""")
_NORM_OF_MLP, _EXPERTS = "pre_mlp_layernorm.", "mlp.experts.experts."
# Our bare parameters, by the suffix of their names in a checkpoint.
_BARE = {"embedding.position": "weight", "mlp.router.expert_bias": "bias"}


def megatron_tensors(arch: Architecture) -> tuple[MegatronTensor, ...]:
    """Return the tensors of a model's checkpoint, each layer and each expert apart.

    Raises UserError where the model has tensors that Megatron-LM's GPT has not.
    """
    table = _Table(arch, logical_shapes(arch))
    found = tuple(table.tensors())
    held = {name for each in found for name, _ in each.tensor.parts}
    lacking = [name for name in table.logical if name not in held]
    kinds = dict.fromkeys(name.replace(f".{n}.", ".N.") for name in lacking for n in name.split(".") if n.isdigit())
    UserError.collect(f"Megatron-LM's GPT has no tensor {name}, which this model needs" for name in kinds or lacking)
    return found


@dataclass(frozen=True)
class _Table:
    arch: Architecture
    logical: Mapping[str, Shape]

    def tensors(self) -> Iterator[MegatronTensor]:
        for names, ours in _FIRST.items():
            yield from self.module(names, ours)
        for n in range(self.arch.num_layers):
            for names, ours in _LAYER.items():
                named = tuple(f"layers.{n}.{part}" for part in ours)
                if "{e}" not in ours[0]:
                    yield from self.module(names, named, n)
                    continue
                for e in range(self.arch.experts.num_experts if self.arch.experts else 0):
                    yield from self.module(names, tuple(part.replace("{e}", str(e)) for part in named), n, e)
        for names, ours in _LAST.items():
            yield from self.module(names, ours)

    def module(
        self, names: tuple[str, ...], ours: tuple[str, ...], layer: int | None = None, expert: int | None = None
    ) -> Iterator[MegatronTensor]:
        """Yield weight and bias of a module, if our model has them; without a gate its first part is missing."""
        bare = ours[0] if layer is None else ours[0].removeprefix(f"layers.{layer}.")
        if bare in _BARE:
            if ours[0] in self.logical:
                yield self.tensor([f"{name}{_BARE[bare]}" for name in names], ours, layer, expert)
            return
        for suffix in ("weight", "bias"):
            parts = tuple(name for part in ours if (name := f"{part}.{suffix}") in self.logical)
            if parts:
                yield self.tensor([f"{name}{suffix}" for name in names], parts, layer, expert)

    def tensor(self, names: list[str], parts: tuple[str, ...], layer: int | None, expert: int | None) -> MegatronTensor:
        is_qkv, is_gated = len(parts) == 3, len(parts) == 2
        shapes = tuple((part, self.logical[part]) for part in parts)
        slots = list(self.slots(names, layer, expert))
        forms: list[Form] = [(slot,) for slot in slots]
        if is_gated:
            forms += [tuple(slot._replace(name=f"{slot.name}_{half}") for half in "wv") for slot in slots]
        groups = self.arch.num_query_groups if is_qkv else 1
        return MegatronTensor(FileTensor(slots[0].name, shapes, is_transposed=False, num_groups=groups), tuple(forms))

    def slots(self, names: list[str], layer: int | None, expert: int | None) -> Iterator[Slot]:
        """Yield the places where a tensor may be, the one that Megatron-LM itself chooses first."""
        if layer is None:
            yield from map(Slot, names)
            return
        arch, depth = self.arch, self.arch.num_layers
        if has_experts(arch, layer) and names[-1].startswith(_NORM_OF_MLP):  # which no linear follows
            names = names[::-1]
        stacked = ("decoder.layers.", ((layer, depth),)), (f"decoder.layers.{layer}.", ())
        is_uniform = len({has_experts(arch, n) for n in range(depth)}) == 1
        for (start, entry), name in product(stacked if is_uniform else stacked[::-1], names):
            if expert is None:
                yield Slot(start + name, entry)
                continue
            count = self.arch.experts.num_experts if self.arch.experts else 0
            yield Slot(start + name, (*entry, (expert, count)))
            yield Slot(start + name.replace(_EXPERTS, f"{_EXPERTS}{expert}."), entry)


# Arguments that have the name and the meaning of a key of the model section; with rotary positions, and with experts,
# further ones.
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length"),
    *("max_position_embeddings", "normalization", "norm_epsilon", "add_bias_linear", "apply_layernorm_1p"),
    *("qk_layernorm", "hidden_dropout", "attention_dropout", "init_method_std"),
)
_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved")
_PATTERNS = ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq")
# Arguments of experts, and the fields of our `Experts` and `Balance`; a value that means the default is left out.
_OF_EXPERTS: Mapping[str, tuple[str, object]] = {
    "moe_router_topk": ("topk", None),
    "moe_ffn_hidden_size": ("ffn_hidden_size", None),
    "moe_shared_expert_intermediate_size": ("shared_ffn_hidden_size", 0),
    "moe_shared_expert_gate": ("has_shared_gate", False),
    "moe_router_score_function": ("score_function", None),
    "moe_router_pre_softmax": ("pre_softmax", False),
    "moe_router_num_groups": ("num_groups", None),
    "moe_router_group_topk": ("group_topk", None),
    "moe_router_topk_scaling_factor": ("scaling_factor", 1.0),
    "moe_router_enable_expert_bias": ("has_expert_bias", False),
}
_OF_BALANCE: Mapping[str, tuple[str, object]] = {
    "moe_router_load_balancing_type": ("loss", None),
    "moe_aux_loss_coeff": ("coeff", None),
    "moe_z_loss_coeff": ("z_coeff", 0.0),
    "moe_router_bias_update_rate": ("bias_update_rate", None),
    "moe_expert_capacity_factor": ("capacity_factor", None),
    "moe_token_drop_policy": ("drop_policy", None),
    "moe_pad_expert_input_to_capacity": ("pads_to_capacity", False),
}
# Arguments of another network; the first value is that of an absent one.
_RULES: Mapping[str, AllowedValues] = {
    "multi_latent_attention": AllowedValues((False, None), "tensors of latent attention are not converted"),
    "mtp_num_layers": AllowedValues((None, 0), "modules of multi-token prediction are not converted"),
    "attention_output_gate": AllowedValues((False, None), "rows of the gate are fused with those of queries"),
    "quick_geglu": AllowedValues((False, None), "that activation is not converted"),
    "glu_linear_offset": AllowedValues((0.0, None), "that activation is not converted"),
    "activation_func_clamp_value": AllowedValues((None,), "that activation is not converted"),
    "softmax_type": AllowedValues(("vanilla", None), "attention sinks are not converted"),
    "qk_l2_norm": AllowedValues((False, None), "queries and keys have norms with weights"),
    "apply_residual_connection_post_layernorm": AllowedValues((False, None), "norms are on the inputs of a layer"),
    "rotary_seq_len_interpolation_factor": AllowedValues((None, 1), "rotations are not interpolated"),
    "is_hybrid_model": AllowedValues((False, None), "every layer has attention"),
    "experimental_attention_variant": AllowedValues((None,), "every layer has attention"),
    "heterogeneous_layers_config_path": AllowedValues((None,), "layers have one shape"),
    "moe_apply_probs_on_input": AllowedValues((False, None), "weights of experts multiply their outputs"),
    "moe_input_jitter_eps": AllowedValues((None,), "inputs of routers have no noise"),
    "moe_latent_size": AllowedValues((None,), "experts see the residual stream"),
}


def read_arguments(arguments: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return the model section of Megatron-LM's arguments; raises UserError with each that our model has not."""
    UserError.collect(
        f"common.pt: {name}={arguments[name]}: {rule.why}; only {' or '.join(map(show, rule.allowed))} works"
        for name, rule in _RULES.items()
        if name in arguments and not rule.allows(_plain(arguments[name]))
    )
    said = {name: _plain(value) for name, value in arguments.items() if value is not None}
    position = "rope" if said.get("use_rotary_position_embeddings") else said.get("position_embedding_type")
    has_rope = position == "rope"
    model: dict[str, JsonValue] = {
        **{name: said[name] for name in (*_SAME, *(_ROTARY if has_rope else ())) if name in said},
        "family": "llama" if has_rope else "gpt2",
        "position_embedding_type": position,
        "activation": _activation(said),
        "tie_embeddings": not said.get("untie_embeddings_and_output_weights", False),
        "make_vocab_size_divisible_by": 1,
    }
    for name in ("rotary_base", "norm_epsilon", "hidden_dropout", "attention_dropout", "init_method_std"):
        if isinstance(value := model.get(name), int):
            model[name] = float(value)
    if said.get("group_query_attention"):
        model["num_query_groups"] = said["num_query_groups"]
    if said.get("add_qkv_bias") and not said.get("add_bias_linear"):
        model["add_qkv_bias"] = True
    if has_rope and said.get("use_rope_scaling"):
        model |= {"rotary_scaling": LLAMA3, "original_max_position_embeddings": 8192}
        model["rotary_scaling_factor"] = float(str(said.get("rope_scaling_factor", 8.0)))
    if "window_size" in said:
        model["window_size"] = said["window_size"]
    model |= {
        name: said[name]
        for name, needed in zip(_PATTERNS, (has_rope, "window_size" in said, "num_experts" in said), strict=True)
        if needed and said.get(name) not in (None, 0, 1)
    }
    return model | (_read_experts(said) if "num_experts" in said else {})


def _activation(said: Mapping[str, JsonValue]) -> str:
    """Return our name of the activation: the fused GELU is approximated by a hyperbolic tangent, the other is exact."""
    if said.get("swiglu"):
        return "swiglu"
    if said.get("squared_relu"):
        return "squared_relu"
    return "gelu_tanh" if said.get("bias_gelu_fusion") and said.get("add_bias_linear") else "gelu"


def _read_experts(said: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    unused = set()
    if said.get("moe_router_load_balancing_type", "none") == "none":
        unused |= {"moe_aux_loss_coeff"}
    if not said.get("moe_router_enable_expert_bias"):
        unused |= {"moe_router_bias_update_rate"}
    if "moe_expert_capacity_factor" not in said:
        unused |= {"moe_token_drop_policy", "moe_pad_expert_input_to_capacity"}
    keys = {name: said[name] for name in (*_OF_EXPERTS, *_OF_BALANCE) if name in said and name not in unused}
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_topk_scaling_factor"):
        if isinstance(value := keys.get(name), int):
            keys[name] = float(value)
    return {**keys, "num_moe_experts": said["num_experts"], "moe_router_bias": bool(said.get("add_bias_linear"))}


def _plain(value: object) -> JsonValue:
    """Return a value as JSON has it; text for one of another type."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_NORMS = ("LayerNorm", "RMSNorm")


def write_arguments(arch: Architecture) -> dict[str, object]:
    """Return Megatron-LM's arguments of a model; `read_arguments` says what they mean."""
    depth, scaling, is_rope = arch.num_layers, arch.rotary_scaling, arch.position_embedding_type == "rope"
    arguments: dict[str, object] = {
        **{name: getattr(arch, name) for name in (*_SAME, *_ROTARY)},
        "normalization": arch.normalization if arch.normalization in _NORMS else _NORMS[0],
        "position_embedding_type": arch.position_embedding_type,
        "swiglu": arch.activation == "swiglu",
        "squared_relu": arch.activation == "squared_relu",
        "bias_gelu_fusion": arch.activation == "gelu_tanh" and arch.add_bias_linear,
        "add_qkv_bias": arch.has_qkv_bias and not arch.add_bias_linear,
        "untie_embeddings_and_output_weights": not arch.tie_embeddings,
        "group_query_attention": arch.num_query_groups != arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "padded_vocab_size": arch.vocab_size,
        "num_experts": None,
    }
    if is_rope and scaling is not None:
        arguments |= {"use_rope_scaling": scaling.kind == LLAMA3, "rope_scaling_factor": scaling.factor}
    if is_rope and arch.no_rope_freq:
        arguments["no_rope_freq"] = _over_depth(arch.no_rope_freq, depth)
    if arch.window is not None:
        arguments["window_size"] = (arch.window - 1, 0)
        if arch.window_pattern:
            arguments["window_attn_skip_freq"] = _over_depth(arch.window_pattern, depth)
    if arch.experts is not None:
        arguments["num_experts"] = arch.experts.num_experts
        arguments["moe_layer_freq"] = [int(has_experts(arch, n)) for n in range(depth)] if arch.experts.layers else 1
        arguments |= _values(arch.experts, _OF_EXPERTS) | _values(arch.balance, _OF_BALANCE)
    return arguments


def _values(fields: object, names: Mapping[str, tuple[str, object]]) -> dict[str, object]:
    """Return arguments from the fields of a value, without those that mean the default."""
    if fields is None:
        return {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    values = {name: getattr(fields, ours) for name, (ours, _) in names.items()}
    return {name: value for name, value in values.items() if value is not None and value != names[name][1]}


def _over_depth(pattern: tuple[int, ...], depth: int) -> list[int]:
    return [pattern[n % len(pattern)] for n in range(depth)]
