"""Architecture of a model with every default resolved, the kind of each layer, and activation recomputation.

Kinds of layers repeat along a short pattern over depth, by the index of a layer in the whole model, so that they do not
depend on the division into stages; this is the one place that reads the keys which choose them.

Activation recomputation is as Megatron defines it (Korthikanti et al. 2022, arXiv:2205.05198):

selective   some modules of every layer: "core_attn" from the output of qkv to the input of proj, "mlp_act" from the
            output of fc1 to the input of fc2, that of experts included, which "moe_act" is alone; "shared_experts";
            "moe", a whole mixture of experts; "mlp", a whole dense MLP; "layernorm", the outputs of the norms before
            attention and MLP; with "core_attn", "mla_up_proj" from the latents of attention on
full        whole layers, of which only the input is saved: all of a stage in runs of `num_layers` ("uniform"), or
            the first `num_layers` of each stage one by one ("block"); "uniform" includes multi-token prediction

Saved activations may be offloaded to host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from pydantic import JsonValue

from megatron3d.attention.rotary_spec import Rotary, RotaryScaling, Temperature
from megatron3d.experts.plan import GLOBAL, Balance, Experts
from megatron3d.model.option_table import ActivationName, ModelOptions, NormName, PositionName

GRANULARITIES = ("none", "selective", "full")
CORE_ATTN, MLP_ACT, MLA_UP_PROJ, MOE_ACT, SHARED_EXPERTS, MOE, DENSE_MLP, LAYERNORM = MODULES = (
    *("core_attn", "mlp_act", "mla_up_proj", "moe_act", "shared_experts", "moe", "mlp", "layernorm"),
)
# Modules whose output alone is recomputed, for those that save it; autograd keeps what they save themselves.
OUTPUTS_ALONE = frozenset({MLP_ACT, MOE_ACT, LAYERNORM})
# Norms of the inputs of attention and MLP.
INPUT_NORMS = ("input_norm", "post_attention_norm")
UNIFORM, BLOCK = METHODS = ("uniform", "block")


class LayerRun(NamedTuple):
    """Consecutive layers that are recomputed together, if they are recomputed; a single one if it is only offloaded."""

    layers: range
    is_recomputed: bool
    is_offloaded: bool = False


@dataclass(frozen=True)
class Recompute:
    """Layers and modules that are recomputed in backward, and whether saved activations are offloaded."""

    granularity: str = "none"
    modules: frozenset[str] = frozenset({CORE_ATTN})
    method: str = UNIFORM
    num_layers: int = 1
    offloads: bool = False

    def __post_init__(self) -> None:
        assert self.granularity in GRANULARITIES, f"granularity {self.granularity} is none of {GRANULARITIES}"
        assert self.modules <= set(MODULES), f"modules {set(self.modules)} are not all among {MODULES}"
        assert self.method in METHODS, f"method {self.method} is none of {METHODS}"

    @property
    def chosen(self) -> frozenset[str]:
        """Modules that each layer recomputes on its own; "mlp_act" has always been the activation of experts too."""
        if self.granularity != "selective":
            return frozenset()
        return self.modules | {MOE_ACT} if MLP_ACT in self.modules else self.modules

    def recomputes(self, module: str, within: Iterable[str] = ()) -> bool:
        """Return whether a module of each layer is recomputed on its own, and no larger one `within` which it is."""
        return module in self.chosen and self.chosen.isdisjoint(within)

    @property
    def recomputes_ahead(self) -> bool:
        """Whether each module of multi-token prediction is recomputed as a whole."""
        return self.granularity == "full" and self.method == UNIFORM

    def runs(self, layers: range) -> Sequence[LayerRun]:
        """Return the layers of a stage as runs, in order."""
        recomputed, rest = list[range](), layers
        if self.granularity == "full" and self.method == UNIFORM:
            recomputed, rest = (
                [layers[i : i + self.num_layers] for i in range(0, len(layers), self.num_layers)],
                range(0),
            )
        elif self.granularity == "full":
            recomputed, rest = [range(n, n + 1) for n in layers[: self.num_layers]], layers[self.num_layers :]
        others = [range(n, n + 1) for n in rest] if self.offloads else [rest]
        return [
            *(LayerRun(each, True, self.offloads) for each in recomputed),
            *(LayerRun(each, False, self.offloads) for each in others),
        ]


NO_RECOMPUTE = Recompute()


GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu"})

# Parameters of an MLP's activation with their initial values, softplus^-1 of 0.8 and 0.3, by `activation`.
ACTIVATION_PARAMS: Mapping[str, Mapping[str, float]] = {
    "xielu": {name: math.log(math.expm1(value)) for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3))}
}

SHARED_NORM = "shared"
# Norms of a layer by `norm_placement`: on the inputs of attention and MLP, on their outputs, or both, or
# one for the inputs of both.
NORM_SITES: Mapping[str, tuple[str, ...]] = {
    "pre": ("input_norm", "post_attention_norm"),
    "post": ("attention_output_norm", "mlp_output_norm"),
    "sandwich": ("input_norm", "attention_output_norm", "post_attention_norm", "mlp_output_norm"),
    SHARED_NORM: ("input_norm",),
}

# Tensors of a norm, weight and bias, by `normalization`.
NORM_TENSORS: Mapping[str, int] = {"LayerNorm": 2, "RMSNorm": 1, "PlainLayerNorm": 0, "BiaslessLayerNorm": 1}


# Options that a model family has its own default of.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "tie_embeddings": True,
    },
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "tie_embeddings": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelOptions):
    """Hyperparameters of the model: its options as configured, and what is derived where they are open.

    Fields with a default came later than the first checkpoints, which lack them, but for `FIRST_OPTIONS`.

    Attributes:
        add_qkv_bias, add_mlp_bias: None where they are as `add_bias_linear`.
        no_rope_freq: pattern that repeats over depth, 1 for a layer without rotary positions; empty: none.
        window: keys that a query sees, itself included; None: all before it.
        window_pattern: pattern that repeats over depth, 0 for a layer without the window; empty: every layer has it.
        q_lora_rank, kv_lora_rank: None: queries come from the residual stream, and so do keys and values.
        qk_head_dim, qk_pos_emb_head_dim, v_head_dim: 0 without latents; with them `kv_channels` is the larger of both
            queries' sum and the values.
        experts: mixture of experts of some layers or all; None: every layer has an MLP.
    """

    # Options, of which none is open.
    ffn_hidden_size: int = field()
    num_query_groups: int = field()
    kv_channels: int = field()
    max_position_embeddings: int = field()
    vocab_size: int = field()
    position_embedding_type: PositionName = field()
    normalization: NormName = field()
    activation: ActivationName = field()
    add_bias_linear: bool = field()
    tie_embeddings: bool = field()
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    # What follows from keys of other names or forms.
    padded_vocab_size: int
    rotary_scaling: RotaryScaling | None = None
    no_rope_freq: tuple[int, ...] = ()
    window: int | None = None
    window_pattern: tuple[int, ...] = ()
    experts: Experts | None = None
    balance: Balance | None = None

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention (`LatentAttention`)."""
        return self.kv_lora_rank is not None

    @property
    def key_size(self) -> int:
        """Size of a head's queries and keys; kernels see `kv_channels`, with zeros behind the shorter of both."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim if self.is_latent else self.kv_channels

    @property
    def value_size(self) -> int:
        """Size of a head's values and output."""
        return self.v_head_dim if self.is_latent else self.kv_channels

    @property
    def mup_width(self) -> float:
        """Width in multiples of that of the model whose hyperparameters muP transfers; 1 without muP."""
        return 1.0 if self.mup_base_hidden_size is None else self.hidden_size / self.mup_base_hidden_size

    @property
    def query_scale(self) -> float:
        """Factor of queries before kernels that divide scores by the root of `kv_channels`."""
        if self.softmax_scale is not None:
            return float(self.softmax_scale * self.kv_channels**0.5)
        return 1.0 if self.key_size == self.kv_channels else math.sqrt(self.kv_channels / self.key_size)

    @property
    def norm_sites(self) -> tuple[str, ...]:
        """The norms of a layer on the residual stream, in the order of the forward pass."""
        return NORM_SITES[self.norm_placement]

    @property
    def activation_params(self) -> Mapping[str, float]:
        """Parameters of the activation of each MLP, single numbers, with their initial values."""
        return ACTIVATION_PARAMS.get(self.activation, {})

    @property
    def mlp_input(self) -> int:
        """What the MLP, or its norm, reads: the layer's input (0), that normed (1), or the sum with attention (2)."""
        if not self.use_parallel_residual:
            return 2
        return int(self.norm_placement == SHARED_NORM)

    @property
    def num_norm_tensors(self) -> int:
        """Tensors of a norm: weight and bias, the weight alone, or none."""
        return NORM_TENSORS[self.normalization]

    @property
    def is_rms_norm(self) -> bool:
        """Whether norms divide by the root mean square; else they subtract the mean first."""
        return self.normalization == "RMSNorm"

    @property
    def has_vanilla_softmax(self) -> bool:
        """Whether attention's weights are the softmax of its scores, neither capped nor with sinks."""
        return self.attention_softcap is None and self.softmax_type == "vanilla"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have a bias."""
        return self.add_bias_linear if self.add_qkv_bias is None else self.add_qkv_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the linears of the MLP have a bias."""
        return self.add_bias_linear if self.add_mlp_bias is None else self.add_mlp_bias


LAYOUT_FIELDS = frozenset({"padded_vocab_size"})
# Options that every checkpoint stores, whatever their default in the configuration.
FIRST_OPTIONS = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "rotary_base", "norm_epsilon"),
        *("qk_layernorm", "hidden_dropout", "attention_dropout", "init_method_std"),
    }
)
# Fields that consist of fields.
_NESTED: Mapping[str, Any] = {"rotary_scaling": RotaryScaling, "experts": Experts, "balance": Balance}


# Fields that no parameter depends on, so that a model may be trained on with other values of them.
FREE_FIELDS = frozenset(
    {
        "seq_length",
        "max_position_embeddings",
        "rotary_base",
        "rotary_scaling",
        "rope_local_base_freq",
        "window",
        "window_pattern",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "balance",
        "mtp_loss_scaling_factor",
    }
)


class FieldChange(NamedTuple):
    """A field whose value in a checkpoint is not that of a model."""

    name: str
    saved: JsonValue
    own: JsonValue


def architecture_record(arch: Architecture) -> dict[str, JsonValue]:
    """Return the fields that a checkpoint stores: not those of the layout, nor those at their default."""
    values, later = _record(arch), _later_fields()
    return {name: value for name, value in values.items() if name not in later or value != later[name]}


def changed_fields(record: Mapping[str, JsonValue], arch: Architecture) -> list[FieldChange]:
    """Return the fields of a checkpoint's architecture that differ from those of a model."""
    own, saved = _record(arch), {**_later_fields(), **{name: _filled(name, value) for name, value in record.items()}}
    names = dict.fromkeys((*own, *saved))
    return [FieldChange(name, saved.get(name), own.get(name)) for name in names if saved.get(name) != own.get(name)]


def is_longer_table(change: FieldChange, arch: Architecture) -> bool:
    """Return whether a change is of the number of learned positions, each of which is a parameter."""
    return change.name == "max_position_embeddings" and arch.position_embedding_type == "learned_absolute"


def may_change(change: FieldChange, arch: Architecture) -> bool:
    """Return whether the weights of a checkpoint fit a model in spite of this difference."""
    return change.name in FREE_FIELDS and not is_longer_table(change, arch)


def _record(arch: Architecture) -> dict[str, JsonValue]:
    return {name: _plain(value) for name, value in asdict(arch).items() if name not in LAYOUT_FIELDS}


def later_options() -> dict[str, JsonValue]:
    """Return the options that old checkpoints lack, with the values that have no effect."""
    names = {each.name for each in fields(ModelOptions)}
    return {name: value for name, value in _later_fields().items() if name in names}


def _later_fields() -> dict[str, JsonValue]:
    """Return the fields that old checkpoints lack, with the value that their models have."""
    later = (each for each in fields(Architecture) if each.default is not MISSING and each.name not in FIRST_OPTIONS)
    return {each.name: _plain(each.default) for each in later}


def architecture_of_record(record: Mapping[str, JsonValue]) -> Architecture:
    """Return the architecture of a checkpoint, without padding of the vocabulary.

    Raises KeyError, TypeError or ValueError where an incompatible version wrote it.
    """
    if missing := FIRST_OPTIONS - set(record):
        raise KeyError(*missing)
    values: dict[str, object] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    for name, kind in _NESTED.items():
        if isinstance(inner := record.get(name), dict):
            values[name] = kind(**{key: tuple(each) if isinstance(each, list) else each for key, each in inner.items()})
    return Architecture(**values, padded_vocab_size=record["vocab_size"])  # type: ignore[arg-type]


def _filled(name: str, value: JsonValue) -> JsonValue:
    """Return a saved field; one that consists of fields gets those that came after it was saved, at their default."""
    if name not in _NESTED or not isinstance(value, dict):
        return value
    later = {each.name: _plain(each.default) for each in fields(_NESTED[name]) if each.default is not MISSING}
    return {**{key: default for key, default in later.items() if default is not None}, **value}


def _plain(value: object) -> JsonValue:
    """Return a value as JSON would give it back, without entries that are None."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value  # type: ignore[return-value]


def default_ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """Return 4 hidden; for gated activations, which have three weights, 8/3 hidden rounded up to a multiple of 256."""
    return -(-8 * hidden_size // 3 // 256) * 256 if activation in GATED else 4 * hidden_size


# State of each router between steps by its name in checkpoints: the bias of its choice, the load of the step before.
EXPERT_BIAS, LOAD = "expert_bias", "load"
# Columns of a router's counts besides those of the experts and of the losses: entropy, dropped choices, least and
# largest bias.
COUNTS_BESIDES = 4


@dataclass(frozen=True)
class AttentionKind:
    """Attention of one layer.

    Attributes:
        rotary: None: its queries and keys are not rotated.
        window: keys that a query sees, itself included; None: all before it.
        temperature: factor of queries by position; None: there is none.
    """

    rotary: Rotary | None
    window: int | None = None
    temperature: Temperature | None = None


def attention_kind(arch: Architecture, layer: int) -> AttentionKind:
    """Return the attention of a layer, counted from 0 in the whole model."""
    pattern = arch.no_rope_freq
    skips = bool(pattern) and bool(pattern[layer % len(pattern)])
    has_rotary = arch.position_embedding_type == "rope" and not skips
    size = arch.qk_pos_emb_head_dim if arch.is_latent else int(arch.kv_channels * arch.rotary_percent)
    windows = arch.window_pattern or (1,)
    window = arch.window if windows[layer % len(windows)] else None
    scaling = arch.rotary_scaling
    factors = scaling.pair_factors(arch.seq_length) if scaling else ()
    rotary = Rotary(arch.rotary_base, size, scaling, arch.rotary_interleaved, factors)
    if window is not None and arch.rope_local_base_freq is not None:
        rotary = Rotary(arch.rope_local_base_freq, size, interleaved=arch.rotary_interleaved)
    has_temperature = temperature(arch) is not None and not (
        has_rotary and arch.attention_temperature_layers == "no_rope"
    )
    return AttentionKind(rotary if has_rotary else None, window, temperature(arch) if has_temperature else None)


def temperature(arch: Architecture) -> Temperature | None:
    """Return the factor of queries by position; None: there is none."""
    beta, length = arch.attention_temperature_beta, arch.attention_temperature_length
    return None if beta is None else Temperature(beta, length, arch.attention_temperature_offset)


def has_experts(arch: Architecture, layer: int) -> bool:
    """Return whether a layer, counted from 0 in the whole model, has a mixture of experts in place of its MLP."""
    if arch.experts is None:
        return False
    pattern = arch.experts.layers
    return not pattern or bool(pattern[layer % len(pattern)])


def expert_layers(arch: Architecture) -> tuple[int, ...]:
    """Return the layers that have a mixture of experts."""
    return tuple(layer for layer in range(arch.num_layers) if has_experts(arch, layer))


def router_names(arch: Architecture) -> list[str]:
    """Return the path of every router of the model, in the order of the forward pass."""
    layers = [f"layers.{layer}" for layer in expert_layers(arch)]
    if arch.num_layers and has_experts(arch, arch.num_layers - 1):
        layers += [f"mtp.{depth}.layer" for depth in range(arch.mtp_num_layers)]
    return [f"{layer}.mlp.router" for layer in layers]


def counts_shape(arch: Architecture) -> tuple[int, int]:
    """Return the shape of what all routers of a model count in a step, in fp64."""
    columns = len((arch.balance or Balance()).logged) + COUNTS_BESIDES
    return len(router_names(arch)), (arch.experts.num_experts + columns if arch.experts else 0)


def counts_each_step(arch: Architecture) -> bool:
    """Return whether routers count in every step, since the next one needs it, and not only where they are watched."""
    has_bias = arch.experts is not None and arch.experts.has_expert_bias
    return has_bias or GLOBAL in (arch.balance or Balance()).losses


def pattern_length(arch: Architecture) -> int:
    """Return the number of layers after which the kinds repeat."""
    experts = len(arch.experts.layers) if arch.experts else 0
    return math.lcm(len(arch.no_rope_freq) or 1, len(arch.window_pattern) or 1, experts or 1)


def layer_counts(arch: Architecture, layers: Iterable[int]) -> Mapping[int, int]:
    """Return how many of these layers are of each kind, by the first layer of the model that is of this kind."""
    firsts = _first_alike(arch)
    return Counter(firsts[layer % len(firsts)] for layer in layers)


@cache
def _first_alike(arch: Architecture) -> tuple[int, ...]:
    """Return the first layer of the kind of each place in the pattern, in which a kind may have many places."""
    firsts: dict[object, int] = {}
    places = range(pattern_length(arch))
    return tuple(firsts.setdefault((attention_kind(arch, at), has_experts(arch, at)), at) for at in places)


def attention_kinds(arch: Architecture) -> tuple[AttentionKind, ...]:
    """Return the distinct attention kinds of all layers, in the order in which they first occur."""
    return tuple(dict.fromkeys(attention_kind(arch, place) for place in layer_counts(arch, range(arch.num_layers))))


def rotaries(arch: Architecture) -> tuple[Rotary, ...]:
    """Return the distinct rotary embeddings of all layers, in the order in which they first occur."""
    return tuple(dict.fromkeys(kind.rotary for kind in attention_kinds(arch) if kind.rotary is not None))


def mean_keys(arch: Architecture) -> float:
    """Return the mean over all layers of the most keys that a query sees: the window, or the whole sequence."""
    return sum(count * keys for keys, count in _keys(arch)) / arch.num_layers


def keys_seen(arch: Architecture, layer: int) -> int:
    """Return the most keys that a query of a layer sees: the window, or the whole sequence."""
    return min(attention_kind(arch, layer).window or arch.seq_length, arch.seq_length)


def widest_window(arch: Architecture) -> int:
    """Return the most keys that a query of any layer sees."""
    return max(keys for keys, _ in _keys(arch))


def has_window(arch: Architecture) -> bool:
    """Return whether a layer has a window that is shorter than the sequence."""
    return any(keys < arch.seq_length for keys, _ in _keys(arch))


def _keys(arch: Architecture) -> Iterator[tuple[int, int]]:
    """Yield the most keys that a query sees, and how many layers have as many."""
    for place, count in layer_counts(arch, range(arch.num_layers)).items():
        yield keys_seen(arch, place), count
