"""Convert config.json to a model section and back; what the target cannot represent is refused or reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

from pydantic import JsonValue, ValidationError

from megatron3d.attention.rotary_spec import YARN
from megatron3d.config.model_defaults import wrong_pair_factors
from megatron3d.config.schema import ModelConfig
from megatron3d.convert.family_table import MODEL_TYPES, SAME_TYPES, WHOLE_MODELS
from megatron3d.convert.fields import (
    CHUNK,
    LOCAL_BASE,
    METADATA,
    SWITCHES,
    HubConfig,
    ModelType,
    arch_value,
    read_layers,
    read_rope,
    show,
    write_layers,
    write_rope,
)
from megatron3d.errors import UserError
from megatron3d.model.spec import Architecture

# Fields of a whole model that hold for its language model too.
_OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")


def language_model(settings: HubConfig) -> tuple[HubConfig, tuple[str, ...]]:
    """Return the fields of the language model that a config.json describes, and notes on what is otherwise.

    They are all, under the name of the model type with the same layers, or those of a part of a whole model.
    """
    said = str(settings.get("model_type"))
    if said in SAME_TYPES:
        note = f"model_type={show(said)}: its layers are those of {SAME_TYPES[said]}, and it converts as that"
        return {**settings, "model_type": SAME_TYPES[said]}, (note,)
    whole, text = WHOLE_MODELS.get(said), settings.get("text_config")
    if whole is None:
        return settings, ()
    if not isinstance(text, dict) or text.get("model_type", whole.text_types[0]) not in whole.text_types:
        raise UserError(
            f"config.json: text_config of model_type={show(said)}: not that of one of the models "
            f"{', '.join(whole.text_types)}; give a folder of one of these"
        )
    shared = {name: settings[name] for name in _OF_WHOLE if name in settings}
    note = f"model_type={show(said)}: the language model is converted, and nothing that reads images"
    return {"model_type": whole.text_types[0], **text, **shared, "architectures": None}, (note,)


def class_name_of(settings: HubConfig) -> str:
    """Return the name of transformers' class of a model type; empty for one that cannot be converted."""
    said = str(settings.get("model_type"))
    found = WHOLE_MODELS.get(said) or MODEL_TYPES.get(SAME_TYPES.get(said, said))
    return found.class_name if found else ""


def model_type_of(settings: HubConfig) -> str:
    """Return the model type; raises UserError for one that cannot be converted."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type={show(model_type)}: megatron3d has the models {', '.join(_known_types())}; "
            "give a folder of one of these"
        )
    named = settings.get("architectures")
    class_name = MODEL_TYPES[model_type].class_name
    if named is not None and named != [class_name]:
        raise UserError(
            f"config.json: architectures={show(named)}: only language models are converted; give a folder that "
            f"{class_name}.save_pretrained wrote"
        )
    return model_type


def _known_types() -> Iterator[str]:
    yield from (*MODEL_TYPES, *SAME_TYPES, *WHOLE_MODELS)


def read_settings(settings: HubConfig, seq_length: int | None = None) -> ModelConfig:
    """Return the model section of a config.json; raises UserError with every field that our model cannot represent.

    Args:
        seq_length: sequence length of later training; None for the longest that the model supports.
    """
    model_type = model_type_of(settings)
    hub_type = MODEL_TYPES[model_type]
    contradictions = [
        f"{old}={show(settings[old])} and {new}={show(settings[new])}: they are one field; remove the wrong one"
        for old, new in hub_type.aliases.items()
        if {old, new} <= settings.keys() and settings[old] != settings[new]
    ]
    settings = {hub_type.aliases.get(name, name): value for name, value in settings.items()}
    settings, rotary, problems = read_rope(settings, hub_type)
    problems += contradictions
    values, found = _values(settings, hub_type)
    layers, wrong = read_layers(settings, hub_type, values["num_layers"])
    problems += [*found, *wrong, *_unknown(settings, hub_type)]
    for derived in hub_type.derived:
        keys, wrong = derived.read({**settings, "num_hidden_layers": values["num_layers"]})
        layers, problems = layers | keys, problems + wrong
    UserError.collect(f"config.json: {problem}" for problem in problems)
    if "window_size" not in layers:
        rotary.pop(LOCAL_BASE, None)
    elif LOCAL_BASE in rotary and "window_attn_skip_freq" not in layers:  # no layer has the other base or its scaling
        rotary = {"rotary_base": rotary[LOCAL_BASE]}
    longest = values["max_position_embeddings"] = layers.get(
        "max_position_embeddings", values["max_position_embeddings"]
    )
    values |= rotary | layers | {"family": hub_type.family, "seq_length": longest if seq_length is None else seq_length}
    if isinstance(longest, int) and seq_length is not None and seq_length > longest:
        limit = next((f" by {name}={show(settings[name])}" for name in (CHUNK,) if settings.get(name) == longest), "")
        raise UserError(f"--seq-length {seq_length}: the model has {longest} positions{limit}; use at most {longest}")
    computed = hub_type.computed if isinstance(values["hidden_size"], int | float) else {}  # else the schema refuses it
    others = {name: of(values.__getitem__) for name, of in computed.items()}
    try:
        model = ModelConfig.model_validate(values | {**hub_type.fixed} | others)
    except ValidationError as error:
        raise UserError(
            *(_wrong(hub_type, detail["loc"], detail["msg"], values) for detail in error.errors())
        ) from error
    UserError.collect(
        f"config.json: {key.removeprefix('rotary_')} has {problem}; it has one for each"
        for key, problem in wrong_pair_factors(model).items()
    )
    return model


def represents(model_type: str, arch: Architecture) -> bool:
    """Return whether a model type computes what a model computes."""
    return model_type in MODEL_TYPES and not any(_obstacles(arch, MODEL_TYPES[model_type]))


def write_settings(arch: Architecture, wanted: str | None = None) -> tuple[str, dict[str, JsonValue], tuple[str, ...]]:
    """Return the model type, config.json without token ids and dtype, and notes on what it cannot represent.

    Raises UserError where the wanted model type (None: no model type) computes the same, with the obstacles of the
    nearest one.
    """
    candidates = MODEL_TYPES if wanted is None else {wanted: MODEL_TYPES[wanted]}
    obstacles = {name: list(_obstacles(arch, hub_type)) for name, hub_type in candidates.items()}
    model_type = min(obstacles, key=lambda name: len(obstacles[name]))
    other = "--model-type allows another" if wanted else f"{model_type} being the nearest"
    UserError.collect(
        f"model.{problem}; no model type of Hugging Face that is written ({', '.join(candidates)}) computes this "
        f"model, {other}; train a model without it to convert it"
        for problem in obstacles[model_type]
    )
    hub_type = MODEL_TYPES[model_type]
    settings: dict[str, JsonValue] = {"model_type": model_type, "architectures": [hub_type.class_name]}
    settings |= hub_type.constants
    for ours, key in hub_type.fields.items():
        settings |= dict.fromkeys(key.names, key.write(arch) if key.write else getattr(arch, ours))
    settings |= write_layers(arch, hub_type)
    for derived in hub_type.derived:
        settings |= derived.write(arch)
    field, _, known = hub_type.activation
    settings[field] = next(theirs for theirs, ours in known.items() if ours == arch.activation)
    if hub_type.has_rope:
        settings |= write_rope(arch, hub_type)
    settings |= {old: settings[new] for old, new in hub_type.aliases.items() if new in settings}
    return model_type, settings, tuple(_lost_values(arch, hub_type))


def _values(settings: HubConfig, hub_type: ModelType) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the values of our keys, and a sentence for each field that they cannot represent."""
    values: dict[str, JsonValue] = {}
    problems = []
    for ours, key in hub_type.fields.items():
        theirs = {name: settings.get(name, key.default) for name in key.names}
        values[ours] = theirs[key.names[0]]
        if any(value != values[ours] for value in theirs.values()):
            pairs = " and ".join(f"{name}={show(value)}" for name, value in theirs.items())
            problems.append(f"{pairs}: both are model.{ours} here; give them the same value if the network allows it")
        if key.read:
            values[ours] = key.read(values[ours])
    field, default, known = hub_type.activation
    activation = settings.get(field, default)
    if isinstance(activation, str) and activation in known:
        values["activation"] = known[activation]
    else:
        problems.append(f"{field}={show(activation)}: not among {', '.join(known)}; convert a model with one of these")
    return values, problems


def _unknown(settings: HubConfig, hub_type: ModelType) -> Iterator[str]:
    """Yield a sentence for each field that may describe another network."""
    known = {*hub_type.read_names, *hub_type.constants, *METADATA}
    for name, rule in hub_type.rules.items():
        value = settings.get(name, rule.allowed[0])
        if not rule.allows(value):
            works = " or ".join(map(show, rule.allowed))
            yield f"{name}={show(value)}: {rule.why}; only {works} works"
    for name, value in settings.items():
        if name not in known and value is not None:
            yield f"{name}={show(value)}: unknown here, so that it may mean another network; remove it if it does not"


def _obstacles(arch: Architecture, hub_type: ModelType) -> Iterator[str]:
    """Yield the properties of a model that this type cannot represent."""
    for name, trait in _traits(arch, hub_type).items():
        value = arch_value(arch, name)
        if value != trait and (name, value) not in hub_type.as_zeros.items():
            yield f"{name}={show(value)}: {hub_type.class_name} has {show(trait)}"
    known = tuple(dict.fromkeys(hub_type.activation[2].values()))
    if arch.activation not in known:
        yield f"activation={arch.activation}: {hub_type.class_name} has {' or '.join(known)}"
    yield from _layer_obstacles(arch, hub_type)
    yield from hub_type.obstacles(arch)
    for derived in hub_type.derived:
        yield from derived.obstacles(arch)


def _traits(arch: Architecture, hub_type: ModelType) -> dict[str, object]:
    """Return the values that our keys have in every model of this type; of switches that it lacks, those without
    effect."""
    chosen = {*hub_type.fields, *hub_type.fixed, *hub_type.computed, *((LOCAL_BASE,) * hub_type.has_local_rope)}
    chosen |= {"softmax_scale"} if hub_type.has_mscale else set()
    chosen |= {"attention_temperature_beta", "attention_temperature_length"} if hub_type.has_beta else set()
    chosen |= {key for derived in hub_type.derived for key in derived.keys}
    # Biases that are the same for all linears need no key of their own.
    absent = {**SWITCHES, **dict.fromkeys(("add_qkv_bias", "add_mlp_bias"), arch.add_bias_linear)}
    computed = {name: of(partial(arch_value, arch)) for name, of in hub_type.computed.items()}
    return {name: value for name, value in absent.items() if name not in chosen} | {**hub_type.fixed} | computed


def _layer_obstacles(arch: Architecture, hub_type: ModelType) -> Iterator[str]:
    """Yield the properties of single layers that this type cannot represent."""
    if arch.experts is not None and not hub_type.has_experts:
        yield f"num_moe_experts={arch.experts.num_experts}: {hub_type.class_name} has no experts"
    pattern = arch.window_pattern or (1,)
    if arch.window is not None and any(pattern):
        size = f"window_size={show((arch.window - 1, 0))}"
        if hub_type.windows is None:
            yield f"{size}: in {hub_type.class_name} every position attends to all earlier ones"
        elif hub_type.windows.default_full is None and not all(pattern):
            yield f"{size}: in {hub_type.class_name} all layers have the window"
    scaling = arch.rotary_scaling
    if scaling is not None and scaling.kind not in hub_type.scalings:
        yield f"rotary_scaling={scaling.kind}: {hub_type.class_name} has {' or '.join(('none', *hub_type.scalings))}"
    length = arch.attention_temperature_length
    original = scaling.original_max_position_embeddings if scaling else None
    if hub_type.has_beta and arch.attention_temperature_beta and original not in (None, length):
        yield f"attention_temperature_length={length}: {hub_type.class_name} has original_max_position_embeddings"
    is_scaled = scaling is not None and scaling.kind == YARN and scaling.factor > 1
    if hub_type.has_mscale and arch.softmax_scale is not None and not is_scaled:
        yield f"softmax_scale={arch.softmax_scale}: {hub_type.class_name} scales scores with rotary_scaling=yarn only"
    chooses_rope = any("no_rope_freq" in derived.keys for derived in hub_type.derived)
    if arch.no_rope_freq and not (hub_type.has_no_rope_layers or chooses_rope):
        yield f"no_rope_freq={show(arch.no_rope_freq)}: every layer of {hub_type.class_name} has rotary positions"
    is_alike = arch.rope_local_base_freq is None and arch.window is not None
    if hub_type.has_local_rope and is_alike and arch.rotary_scaling:
        yield f"rope_local_base_freq=null: layers of {hub_type.class_name} with a window have unscaled rotary positions"


def _lost_values(arch: Architecture, hub_type: ModelType) -> Iterator[str]:
    """Yield a note for each value that config.json has no field for; these matter for further training only."""
    for name, value in hub_type.as_zeros.items():
        if getattr(arch, name) == value:
            back = show(hub_type.fixed[name])
            yield f"model.{name}={show(value)}: the tensors are written as zeros; a conversion back will say {back}"
    known_names = {*hub_type.fields, *hub_type.fixed, "activation", "padded_vocab_size", "num_query_groups"}
    known_names |= {"kv_channels", "experts", "balance", "rotary_scaling", "no_rope_freq", "window", "window_pattern"}
    # The last is a factor of training only, without effect where mtp_num_layers is 0.
    known_names |= {*SWITCHES, *(() if hub_type.has_rope else ("rotary_base",)), "mtp_loss_scaling_factor"}
    for name in (field.name for field in fields(arch) if field.name not in known_names):
        silences = {"hidden_dropout": 0.0, "seq_length": arch.max_position_embeddings, "mup_base_hidden_size": None}
        value, silent = getattr(arch, name), silences[name]
        if value != silent:
            yield f"model.{name}={show(value)} has no field in config.json; a conversion back will say {show(silent)}"


def _wrong(hub_type: ModelType, place: tuple[int | str, ...], rule: str, values: HubConfig) -> str:
    """Return the message for a field whose value our schema refuses."""
    ours = str(place[0])
    theirs = hub_type.fields[ours].names[0] if ours in hub_type.fields else ours
    return f"config.json: {theirs}={show(values.get(ours))}: {rule[0].lower()}{rule[1:]}"
