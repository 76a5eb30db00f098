"""Description of a model type by fields of config.json and keys of ours; conversion of windows and rotary positions.

sliding_window = 4096, layer_types = ["sliding_attention", ...]         model.window_size = [4095, 0], ...
rope_parameters = {"rope_type": "llama3", "factor": 8.0, ...}           model.rotary_scaling = llama3, ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import JsonValue

from megatron3d.attention.rotary_spec import LINEAR, LLAMA3, LONGROPE, YARN, longrope_attention_factor
from megatron3d.model.spec import Architecture, later_options

HubConfig = Mapping[str, JsonValue]
# Dtypes of weights that are written, as the option --dtype and as torch name them.
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def show(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value)


@dataclass(frozen=True)
class FieldMapping:
    """Fields of config.json that must all have the value of one key of ours; `default` is that of an absent field.

    Attributes:
        read, write: our value of theirs, and the reverse, which sees the whole architecture; None: they are equal.
    """

    names: tuple[str, ...]
    default: JsonValue
    read: Callable[[JsonValue], JsonValue] | None = None
    write: Callable[[Architecture], JsonValue] | None = None


@dataclass(frozen=True)
class AllowedValues:
    """Values of a field, or of each entry of a list, that describe our model, and why no other one is possible.

    The first one is that of an absent field.
    """

    allowed: tuple[JsonValue, ...]
    why: str

    def allows(self, value: JsonValue) -> bool:
        """Return whether the value describes our model."""
        return value in self.allowed or (isinstance(value, list) and all(entry in self.allowed for entry in value))


@dataclass(frozen=True)
class Windows:
    """Sliding windows of a model type.

    Attributes:
        default: window of a config.json without `sliding_window`.
        default_full: whether a layer, of a config.json without `layer_types`, sees the whole sequence; None: all
            layers have the window, and there is no such field.
        has_switch: whether `use_sliding_window` turns windows on; its default is off.
        interval_name: field that `default_full` reads; None: it reads none of its own.
    """

    default: int | None
    default_full: Callable[[HubConfig, int], bool] | None = None
    has_switch: bool = False
    interval_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that describe windows."""
        types = ("layer_types",) if self.default_full else ()
        interval = (self.interval_name,) if self.interval_name else ()
        return ("sliding_window", *types, *interval, *(("use_sliding_window",) if self.has_switch else ()))


@dataclass(frozen=True)
class DerivedKeys:
    """Keys of ours that follow from several fields of config.json.

    Attributes:
        names: the fields.
        keys: names of the architecture's values that they choose.
        read: returns our keys, and problems.
        write: returns the fields of an architecture.
        obstacles: yields values of an architecture that the fields cannot represent.
        model_keys: the keys that the documentation names.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[HubConfig], tuple[dict[str, JsonValue], list[str]]]
    write: Callable[[Architecture], dict[str, JsonValue]]
    obstacles: Callable[[Architecture], Iterator[str]] = lambda arch: iter(())
    model_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelType:
    """A model type of Hugging Face transformers that can be converted.

    Attributes:
        class_name: entry of `architectures`.
        family: family of our model.
        fields: fields of config.json for each key of our model section.
        activation: the field, its default, and our activation for each of its values.
        fixed: values that our architecture has in every model of this type.
        obstacles: yields further properties of an architecture that this type cannot represent.
        rules: fields for which our model allows only certain values.
        has_rope: whether config.json describes rotary positions.
        computed: values of our keys that follow from others, each a function of the value of a key.
        windows: sliding windows of this type; None: it has none.
        has_no_rope_layers: whether config.json lists the layers with rotary positions.
        has_local_rope: whether layers with a window have rotary positions of their own, which are not scaled.
        local_base: their base in a config.json without `rope_local_base_freq`; None: the base of the other layers, and
            there is no such field.
        scalings: kinds of scaled rotary positions that it can have.
        original_length: default of the field of the sequence length before scaling, which is not in the description of
            rotary positions; None: it is there.
        has_only_type: whether `rope_scaling` names the kind of scaling in `type` alone.
        has_beta: whether the description of rotary positions has a factor of queries by position.
        has_alpha: whether scaled positions of kind dynamic have a fixed `alpha`, which changes the base alone.
        has_mscale: whether `mscale_all_dim` of scaled rotary positions also chooses the factor of attention's scores.
        constants: further fields that are written.
        derived: keys that follow from several fields.
        as_zeros: values that a model of this type represents exactly with tensors of zeros.
        aliases: names of fields in older files.
        body: prefix of tensor names, which files of a model without head omit.
    """

    class_name: str
    family: str
    fields: Mapping[str, FieldMapping]
    activation: tuple[str, str, Mapping[str, str]]
    fixed: Mapping[str, object]
    obstacles: Callable[[Architecture], Iterator[str]]
    rules: Mapping[str, AllowedValues]
    has_rope: bool = True
    body: str = "model."
    aliases: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Callable[[str], Any]], object]] = field(default_factory=dict)
    windows: Windows | None = None
    has_no_rope_layers: bool = False
    has_local_rope: bool = False
    local_base: float | None = None
    has_mscale: bool = False
    has_alpha: bool = False
    has_beta: bool = False
    scalings: tuple[str, ...] = (LINEAR, LLAMA3, YARN)
    original_length: int | None = None
    has_only_type: bool = False
    constants: Mapping[str, JsonValue] = field(default_factory=dict)
    as_zeros: Mapping[str, object] = field(default_factory=dict)
    derived: tuple[DerivedKeys, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether layers can have experts."""
        return any("experts" in derived.keys for derived in self.derived)

    @property
    def read_names(self) -> frozenset[str]:
        """Names of all fields that are read or checked."""
        names = {name for key in self.fields.values() for name in key.names} | {self.activation[0], *self.rules}
        names |= {"partial_rotary_factor"} if "rotary_percent" in self.fields else set()
        names |= set(self.windows.names) if self.windows else set()
        names |= {"rope_local_base_freq"} if self.local_base else set()
        names |= {"no_rope_layers", "no_rope_layer_interval"} if self.has_no_rope_layers else set()
        names |= {*self.aliases} | {name for each in self.derived for name in each.names}
        return frozenset(names)


@dataclass(frozen=True)
class WholeModel:
    """A published model of text and images, of which the language model is converted.

    Attributes:
        class_name: entry of `architectures`.
        text_types: model types that `text_config` may have; the first is that of one that names none.
        prefixes: how names of the language model's tensors begin, and how they begin in a folder of it alone.
        others: how names of the other tensors begin.
    """

    class_name: str
    text_types: tuple[str, ...]
    prefixes: Mapping[str, str]
    others: tuple[str, ...]

    def text_name(self, name: str) -> str | None:
        """Return the name of a tensor in a folder of the language model alone; None for one of another part."""
        if name.startswith(self.others):
            return None
        start = next((start for start in self.prefixes if name.startswith(start)), "")
        return self.prefixes.get(start, "") + name.removeprefix(start)


def arch_value(arch: Architecture, name: str) -> Any:
    """Return the value of one of our keys; biases that are left out are those of all linears."""
    effective = {"add_qkv_bias": "has_qkv_bias", "add_mlp_bias": "has_mlp_bias", "multi_latent_attention": "is_latent"}
    return getattr(arch, effective.get(name, name))


# Options of layers, each with the value that has no effect; a model type without a field for one has this value.
OF_TRAINING = ("mtp_loss_scaling_factor", "mup_base_hidden_size")  # and no option of what a layer computes
SWITCHES = {name: value for name, value in later_options().items() if name not in OF_TRAINING}

# Fields that do not affect what the network computes.
_METADATA = """
_name_or_path _commit_hash _attn_implementation_autoset architectures model_type transformers_version torch_dtype
dtype use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id task_specific_params n_ctx
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout gradient_checkpointing
output_past output_attentions output_hidden_states return_dict id2label label2id num_labels problem_type
finetuning_task chunk_size_feed_forward rope_theta rope_scaling rope_parameters _num_labels is_decoder
is_llama_config n_special predict_special_tokens max_sequence_length max_window_layers cache_implementation
_sliding_window_pattern original_max_position_embeddings tokenizer_class prefix torchscript use_bfloat16
tf_legacy_loss attn_implementation _attn_implementation _flash_attn_2_enabled unsloth_fixed unsloth_version
transformers.js_config auto_map output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size
model_max_length
"""
# Defaults of text generation, which transformers 4 also stores in config.json.
_GENERATION = """
max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores output_logits return_dict_in_generate
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
begin_suppress_tokens decoder_start_token_id max_time renormalize_logits
"""
METADATA = frozenset((_METADATA + _GENERATION).split())


SLIDING, FULL = "sliding_attention", "full_attention"


def read_layers(
    settings: HubConfig, hub_type: ModelType, num_layers: JsonValue
) -> tuple[dict[str, JsonValue], list[str]]:
    """Return our keys of windows and of layers without rotary positions, and problems."""
    if not isinstance(num_layers, int):  # which the schema refuses
        return {}, []
    values, problems = _windows(settings, hub_type.windows, num_layers) if hub_type.windows else ({}, [])
    if hub_type.has_no_rope_layers:
        skipped, wrong = _layers_without_rope(settings, num_layers)
        return values | skipped, problems + wrong
    return values, problems


def write_layers(arch: Architecture, hub_type: ModelType) -> dict[str, JsonValue]:
    """Return the fields of an architecture's windows and of its layers without rotary positions."""
    found: dict[str, JsonValue] = {}
    windows = hub_type.windows
    if windows:
        found["sliding_window"] = arch.window
        if windows.has_switch:
            found["use_sliding_window"] = arch.window is not None
        if windows.default_full:
            has = (arch.window_pattern or (1,)) if arch.window is not None else (0,)
            found["layer_types"] = [SLIDING if has[n % len(has)] else FULL for n in range(arch.num_layers)]
    if hub_type.has_no_rope_layers:
        skips = arch.no_rope_freq or (0,)
        found["no_rope_layers"] = [1 - skips[n % len(skips)] for n in range(arch.num_layers)]
    return found


def _windows(settings: HubConfig, windows: Windows, num_layers: int) -> tuple[dict[str, JsonValue], list[str]]:
    window = settings.get("sliding_window", windows.default)
    if windows.has_switch and not settings.get("use_sliding_window"):
        window = None
    types = settings.get("layer_types")
    if windows.default_full is None or (window is None and types is None):
        return _keys(window, ()), []
    if types is None:
        return _keys(window, [0 if windows.default_full(settings, n) else 1 for n in range(num_layers)]), []
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (SLIDING, FULL) for each in types):
        return {}, [
            f"layer_types={show(types)}: a list of {num_layers} entries {SLIDING} or {FULL} works; other kinds of "
            "attention cannot be converted"
        ]
    has = [int(each == SLIDING) for each in types]
    if window is None and any(has):
        return {}, [f"layer_types={show(types)}: there is no window; sliding_window must be a number"]
    return _keys(window, has), []


def _keys(window: JsonValue, has: Sequence[int]) -> dict[str, JsonValue]:
    """Return the keys of a window in layers with a 1; of no layers: in all."""
    if not isinstance(window, int) or (has and not any(has)):
        return {}
    size: dict[str, JsonValue] = {"window_size": [window - 1, 0]}
    return size if all(has) else {**size, "window_attn_skip_freq": shortest_pattern(has)}


def read_no_rope(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return our key of layers without rotary positions, and problems."""
    num_layers = settings.get("num_hidden_layers")
    return _layers_without_rope(settings, num_layers) if isinstance(num_layers, int) else ({}, [])


def _layers_without_rope(settings: HubConfig, num_layers: int) -> tuple[dict[str, JsonValue], list[str]]:
    listed, interval = settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if not listed and isinstance(interval, int) and interval > 0:
        listed = [int((n + 1) % interval != 0) for n in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(each in (0, 1) for each in listed):
        return {}, [f"no_rope_layers={show(listed)}: a list of {num_layers} entries works, 0 for no rotary positions"]
    skipped = [1 - int(bool(each)) for each in listed]
    return ({"no_rope_freq": shortest_pattern(skipped)} if any(skipped) else {}), []


def shortest_pattern(flags: Sequence[int]) -> list[JsonValue]:
    """Return the shortest list whose repetition begins with these flags."""
    places = range(len(flags))
    return list(flags[: next((n + 1 for n in places if all(flags[m] == flags[m % (n + 1)] for m in places)), 0)])


LOCAL_BASE = "rope_local_base_freq"
CHUNK = "attention_chunk_size"
_DESCRIPTIONS = ("rope_parameters", "rope_scaling")
_ANYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Our key of each field of a scaling.
_LENGTH = {"factor": "rotary_scaling_factor", "original_max_position_embeddings": "original_max_position_embeddings"}
_KEYS: Mapping[str, Mapping[str, str]] = {
    LINEAR: {"factor": "rotary_scaling_factor"},
    LLAMA3: {**_LENGTH, "low_freq_factor": "rotary_low_freq_factor", "high_freq_factor": "rotary_high_freq_factor"},
    YARN: {
        **_LENGTH,
        **{name: f"rotary_{name}" for name in ("beta_slow", "beta_fast", "attention_factor", "truncate")},
    },
    LONGROPE: {**_LENGTH, **{name: f"rotary_{name}" for name in ("short_factor", "long_factor", "attention_factor")}},
}
# Names of LongRoPE in the first files that have it, with what tells that they mean it.
_OLDER_LONGROPE = frozenset({"su", "yarn"})
_ORIGINAL = "original_max_position_embeddings"
# DeepSeek's description of the attention factor.
_MSCALES = frozenset({"mscale", "mscale_all_dim"})


def read_rope(settings: HubConfig, hub_type: ModelType) -> tuple[HubConfig, dict[str, JsonValue], list[str]]:
    """Return the settings with the rotary base in `rope_theta`, our keys of a scaling, and problems."""
    if not hub_type.has_rope:
        found = [name for name in ("rope_theta", *_DESCRIPTIONS) if settings.get(name) is not None]
        problems = [f"{name}={show(settings[name])}: gpt2 has no rotary positions; remove it" for name in found]
        return settings, {}, problems
    values, problems, local = list[dict[str, JsonValue]](), list[str](), None
    for name in _DESCRIPTIONS:
        rope = settings.get(name)
        if hub_type.has_local_rope and isinstance(rope, dict) and (SLIDING in rope or FULL in rope):
            local, rope = rope.get(SLIDING), rope.get(FULL)
        if rope is None:
            continue
        factors: dict[str, JsonValue] = {}
        if hub_type.has_beta and isinstance(rope, dict):
            rope, factors, wrong = _factors_of_queries(rope)
            problems += [f"{name}={show(settings[name])}: {problem}" for problem in wrong]
        if hub_type.has_alpha and isinstance(rope, dict):
            rope = dict(_with_alpha(rope, settings, hub_type))
        if isinstance(rope, dict) and _kind(rope) == LONGROPE:
            rope = {_ORIGINAL: settings.get(_ORIGINAL, hub_type.original_length), **rope}
        if problem := _problem(rope, hub_type, settings):
            problems.append(f"{name}={show(rope)}: {problem}")
        elif isinstance(rope, dict):
            chosen: HubConfig = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
            settings = {**settings, **chosen}
            values.append(_scaling(rope, settings.get("max_position_embeddings")) | factors)
    if len(values) == 2 and values[0] != values[1]:
        both = " and ".join(f"{name}={show(settings[name])}" for name in _DESCRIPTIONS)
        problems.append(f"{both}: they describe different rotary positions; remove the wrong one")
    ours = values[0] if values else {}
    if hub_type.has_mscale and ours.get("rotary_scaling") == YARN and not problems:
        ours = ours | _score_scale(settings)
    if hub_type.has_local_rope:
        base, wrong = _local_base(settings, local, hub_type)
        ours, problems = ours | base, problems + wrong
    return settings, ours, problems


_BETA = "llama_4_scaling_beta"


def _factors_of_queries(rope: dict[str, JsonValue]) -> tuple[dict[str, JsonValue], dict[str, JsonValue], list[str]]:
    """Return a description without the factor of queries by position, our keys of the factor, and problems."""
    beta, length = rope.get(_BETA), rope.get(_ORIGINAL)
    others = {name: value for name, value in rope.items() if name not in (_BETA, "max_position_embeddings")}
    if _kind(rope) in ("default", LINEAR):
        others.pop(_ORIGINAL, None)
    if not isinstance(beta, int | float) or not isinstance(length, int):
        return others, {}, [f"this type has numbers as {_BETA} (0 for no factor of queries) and {_ORIGINAL}; add them"]
    return others, ({"attention_temperature_beta": beta, "attention_temperature_length": length} if beta else {}), []


def _with_alpha(rope: Mapping[str, JsonValue], settings: HubConfig, hub_type: ModelType) -> Mapping[str, JsonValue]:
    """Return a description with a fixed `alpha` as an unscaled one with the base alpha^(d / (d - 2)) times as large."""
    alpha, base = (
        rope.get("alpha"),
        rope.get("rope_theta", settings.get("rope_theta", hub_type.fields["rotary_base"].default)),
    )
    size = settings.get("head_dim") or _quotient(settings.get("hidden_size"), settings.get("num_attention_heads"))
    numbers = [each for each in (alpha, base, size) if isinstance(each, int | float)]
    if _kind(rope) != "dynamic" or len(numbers) < 3 or numbers[2] <= 2:
        return rope
    return {"rope_type": "default", "rope_theta": numbers[1] * numbers[0] ** (numbers[2] / (numbers[2] - 2))}


def _quotient(hidden: JsonValue, heads: JsonValue) -> JsonValue:
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _score_scale(settings: HubConfig) -> dict[str, JsonValue]:
    """Return the factor of attention's scores, which DeepSeek multiplies by the square of a scaling's factor."""
    ropes = [rope for name in _DESCRIPTIONS if isinstance(rope := settings.get(name), dict)]
    mscale, factor = ropes[0].get("mscale_all_dim"), ropes[0].get("factor")
    sizes = settings.get("qk_nope_head_dim", 128), settings.get("qk_rope_head_dim", 64)
    if not mscale or not all(isinstance(number, int | float) for number in (mscale, factor, *sizes)):
        return {}
    return {"softmax_scale": _scaled_scores(float(mscale), float(factor), sum(sizes))}  # type: ignore[arg-type]


def _scaled_scores(mscale: float, factor: float, key_size: int) -> float:
    return float(key_size**-0.5 * (0.1 * mscale * math.log(max(factor, 1.0)) + 1) ** 2)


def _mscales_of(arch: Architecture) -> dict[str, JsonValue]:
    """Return DeepSeek's fields for the factors of scores, and of queries and keys; a scaling by 1 has none."""
    scaling = arch.rotary_scaling
    if scaling is None or scaling.attention_factor is None or scaling.factor <= 1:
        return {}
    below, slope = 0.0, 0.1 * math.log(scaling.factor)
    if arch.softmax_scale is not None:
        exact = (math.sqrt(arch.softmax_scale * arch.key_size**0.5) - 1) / slope
        below = round(exact, 9)
        below = below if _scaled_scores(below, scaling.factor, arch.key_size) == arch.softmax_scale else exact
    above = (scaling.attention_factor * (slope * below + 1) - 1) / slope
    return {"mscale": round(above, 9), "mscale_all_dim": below}


def _local_base(settings: HubConfig, local: JsonValue, hub_type: ModelType) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the rotary base of layers with a window, which is not scaled, and problems."""
    default = hub_type.fields["rotary_base"].default
    base = settings.get(LOCAL_BASE, hub_type.local_base or settings.get("rope_theta", default))
    if local is None:
        return {LOCAL_BASE: base}, []
    known = {"rope_type", "type", "rope_theta"}
    if not isinstance(local, dict) or _kind(local) != "default" or not known.issuperset(local):
        return {}, [f"rope_parameters of {SLIDING}={show(local)}: only rope_type default with a rope_theta works"]
    return {LOCAL_BASE: local.get("rope_theta", base)}, []


def write_rope(arch: Architecture, hub_type: ModelType) -> dict[str, JsonValue]:
    """Return the fields of an architecture's rotary positions: transformers 5 reads the first, before it the others."""
    scaling: dict[str, JsonValue] | None = None
    if arch.rotary_scaling is not None:
        known = {name: value for name, value in asdict(arch.rotary_scaling).items() if value is not None}
        known |= {name: list(value) for name, value in known.items() if isinstance(value, tuple)}
        scaling = {"rope_type": known.pop("kind"), **known, **(_mscales_of(arch) if hub_type.has_mscale else {})}
    plain: dict[str, JsonValue] = {"rope_type": "default", "rope_theta": arch.rotary_base}
    if "rotary_percent" in hub_type.fields:
        plain["partial_rotary_factor"] = arch.rotary_percent
    if hub_type.has_beta:
        length = (scaling or {}).get(_ORIGINAL, arch.attention_temperature_length)
        plain |= {_BETA: arch.attention_temperature_beta or 0.0, _ORIGINAL: length}
    described: dict[str, JsonValue] = {**plain, **(scaling or {})}
    older = scaling if not hub_type.has_beta else None  # which no earlier version reads
    if scaling and hub_type.has_only_type:
        older = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    if hub_type.original_length and scaling:
        length = scaling[_ORIGINAL]
        return {"rope_parameters": described, "rope_scaling": _three_fields(arch, scaling), _ORIGINAL: length}
    if not hub_type.has_local_rope:
        return {"rope_parameters": described, "rope_scaling": older}
    local = arch.rotary_base if arch.rope_local_base_freq is None else arch.rope_local_base_freq
    both: dict[str, JsonValue] = {SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: described}
    return {"rope_parameters": both, "rope_scaling": older, **({LOCAL_BASE: local} if hub_type.local_base else {})}


def _three_fields(arch: Architecture, scaling: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the description of LongRoPE that Phi-3's older classes allow, all fields where it does not suffice."""
    made = arch.rotary_scaling
    assert made is not None, "called with a scaling"
    length = made.original_max_position_embeddings or 1
    ratio = max(arch.max_position_embeddings / length, 1.0)
    if made.attention_factor != longrope_attention_factor(ratio, length):
        return scaling
    return {"type": made.kind, **{name: scaling[name] for name in ("short_factor", "long_factor")}}


def _kind(rope: Mapping[str, JsonValue]) -> JsonValue:
    kind = rope.get("rope_type", rope.get("type", "default"))
    return LONGROPE if kind in _OLDER_LONGROPE and "short_factor" in rope else kind


def _problem(rope: JsonValue, hub_type: ModelType, settings: HubConfig) -> str | None:
    """Return why a description of rotary positions cannot be represented, None if it can."""
    *others, last = hub_type.scalings
    kinds = f"only null or rope_type {', '.join(('default', *others))} or {last} works"
    if not isinstance(rope, dict):
        return f"not a table; {kinds}"
    kind = _kind(rope)
    if kind != "default" and kind not in hub_type.scalings:
        return f"this scaling of rotary positions is unknown here; {kinds}"
    keys = _KEYS.get(str(kind), {})
    known = {*_ANYWHERE, *keys} | (_MSCALES if kind == YARN else set())
    if others := [name for name, value in rope.items() if name not in known and value is not None]:
        return f"{', '.join(others)} of rope_type {kind} is unknown here; remove it if it has no effect"
    if kind == LONGROPE:
        return _longrope_problem(rope, hub_type, settings)
    if "factor" in keys and not isinstance(rope.get("factor"), int | float):
        return f"rope_type {kind} has a number as factor; add it"
    return None


def _longrope_problem(rope: Mapping[str, JsonValue], hub_type: ModelType, settings: HubConfig) -> str | None:
    length, above = rope.get(_ORIGINAL), settings.get(_ORIGINAL, hub_type.original_length)
    if not isinstance(length, int) or length < 2:
        return f"rope_type {LONGROPE} has a number above 1 as {_ORIGINAL}; add it"
    if above != length:
        return f"{_ORIGINAL} is {show(above)} next to it, which counts; use the right one in both places"
    if any(not isinstance(rope.get(name), list) for name in ("short_factor", "long_factor")):
        return f"rope_type {LONGROPE} has lists as short_factor and long_factor; add them"
    return None


def _scaling(rope: Mapping[str, JsonValue], positions: JsonValue) -> dict[str, JsonValue]:
    """Return the keys of a description; a missing original length is, as in transformers, the model's `positions`."""
    kind = str(_kind(rope))
    if kind not in _KEYS:
        return {}
    keys = _KEYS[kind]
    values: dict[str, JsonValue] = {"rotary_scaling": kind}
    values |= {ours: rope[theirs] for theirs, ours in keys.items() if rope.get(theirs) is not None}
    if "original_max_position_embeddings" in keys:
        values.setdefault("original_max_position_embeddings", positions)
    length = values.get(_ORIGINAL)
    if kind == LONGROPE and isinstance(length, int) and isinstance(positions, int | float):
        values.setdefault("rotary_scaling_factor", max(positions / length, 1.0))
        default = longrope_attention_factor(float(str(values["rotary_scaling_factor"])), length)
        values.setdefault("rotary_attention_factor", default)
    if kind == YARN and rope.get("attention_factor") is None:
        factor, scales = rope["factor"], [rope.get(name) for name in ("mscale", "mscale_all_dim")]
        if all(scales) and isinstance(factor, int | float) and factor > 1:
            above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales if isinstance(scale, int | float))
            values["rotary_attention_factor"] = above / below
    return values
