"""config.json to a model section and back; what either side cannot say is refused, or said, never dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields

from pydantic import JsonValue, ValidationError

from megatron3d.config.schema import ModelConfig
from megatron3d.convert.model_types import METADATA, MODEL_TYPES, ModelType
from megatron3d.errors import UserError
from megatron3d.model.architecture import Architecture

HubConfig = Mapping[str, JsonValue]
_ROPE = ("rope_parameters", "rope_scaling")


def model_type_of(settings: HubConfig) -> str:
    """The model type; raises UserError for one that is not converted."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type={_show(model_type)}: megatron3d has the models {' and '.join(MODEL_TYPES)}; "
            "give a folder of one of these"
        )
    named = settings.get("architectures")
    class_name = MODEL_TYPES[model_type].class_name
    if named is not None and named != [class_name]:
        raise UserError(
            f"config.json: architectures={_show(named)}: only language models are converted; give a folder that "
            f"{class_name}.save_pretrained wrote"
        )
    return model_type


def read_settings(settings: HubConfig, seq_length: int | None = None) -> ModelConfig:
    """The model section of a config.json; raises UserError with every field that our model cannot represent.

    Args:
        seq_length: of later training; the longest that the model takes where None.
    """
    model_type = model_type_of(settings)
    dialect = MODEL_TYPES[model_type]
    settings, problems = _plain_rope(settings, dialect)
    values, found = _values(settings, dialect)
    problems += [*found, *_unknown(settings, dialect)]
    UserError.collect(f"config.json: {problem}" for problem in problems)
    longest = values["max_position_embeddings"]
    values |= {"family": model_type, "seq_length": longest if seq_length is None else seq_length}
    if isinstance(longest, int) and seq_length is not None and seq_length > longest:
        raise UserError(f"--seq-length {seq_length}: the model has {longest} positions; use at most {longest}")
    try:
        return ModelConfig.model_validate(values | {**dialect.traits})
    except ValidationError as error:
        raise UserError(
            *(_wrong(dialect, detail["loc"], detail["msg"], values) for detail in error.errors())
        ) from error


def write_settings(arch: Architecture) -> tuple[str, dict[str, JsonValue], tuple[str, ...]]:
    """Model type, config.json without token ids and data type, and notes on what it cannot say.

    Raises UserError, with what keeps it from the nearest model type, where no model type computes the same.
    """
    obstacles = {name: list(_obstacles(arch, dialect)) for name, dialect in MODEL_TYPES.items()}
    model_type = min(obstacles, key=lambda name: len(obstacles[name]))
    UserError.collect(
        f"model.{problem}; no model type of Hugging Face that is written ({', '.join(MODEL_TYPES)}) computes this "
        f"model, {model_type} being the nearest; train a model without it to convert it"
        for problem in obstacles[model_type]
    )
    dialect = MODEL_TYPES[model_type]
    settings: dict[str, JsonValue] = {"model_type": model_type, "architectures": [dialect.class_name]}
    for ours, key in dialect.keys.items():
        settings |= dict.fromkeys(key.names, getattr(arch, ours))
    field, _, known = dialect.activation
    settings[field] = next(theirs for theirs, ours in known.items() if ours == arch.activation)
    if dialect.has_rope:  # the first is read by transformers 5, the others by what came before
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": arch.rotary_base}
        settings["rope_scaling"] = None
    return model_type, settings, tuple(_unsaid(arch, dialect))


def _plain_rope(settings: HubConfig, dialect: ModelType) -> tuple[HubConfig, list[str]]:
    """The same with the base of rotary positions in `rope_theta`, and what is wrong with what describes them."""
    if not dialect.has_rope:
        found = [name for name in ("rope_theta", *_ROPE) if settings.get(name) is not None]
        return settings, [f"{name}={_show(settings[name])}: gpt2 has no rotary positions; remove it" for name in found]
    problems = []
    for name in _ROPE:
        rope = settings.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        extra = (
            set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"} if isinstance(rope, dict) else ()
        )
        if not isinstance(rope, dict) or kind != "default" or extra:
            problems.append(
                f"{name}={_show(rope)}: rotary positions are not scaled here; only null or rope_type default works, so "
                "convert a model that was trained without scaling"
            )
            continue
        settings = {**settings, **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}}
    return settings, problems


def _values(settings: HubConfig, dialect: ModelType) -> tuple[dict[str, JsonValue], list[str]]:
    """Our keys' values, and a sentence for each field that none of ours can have."""
    values: dict[str, JsonValue] = {}
    problems = []
    for ours, key in dialect.keys.items():
        theirs = {name: settings.get(name, key.default) for name in key.names}
        values[ours] = theirs[key.names[0]]
        if any(value != values[ours] for value in theirs.values()):
            pairs = " and ".join(f"{name}={_show(value)}" for name, value in theirs.items())
            problems.append(f"{pairs}: both are model.{ours} here; give them the same value if the network allows it")
    field, default, known = dialect.activation
    activation = settings.get(field, default)
    if isinstance(activation, str) and activation in known:
        values["activation"] = known[activation]
    else:
        problems.append(f"{field}={_show(activation)}: not among {', '.join(known)}; convert a model with one of these")
    return values, problems


def _unknown(settings: HubConfig, dialect: ModelType) -> Iterator[str]:
    """A sentence for each field that could make another network."""
    known = {name for key in dialect.keys.values() for name in key.names} | {dialect.activation[0]} | METADATA
    for name, value in settings.items():
        rule = dialect.rules.get(name)
        if rule is not None:
            if value not in rule.allowed:
                works = " or ".join(map(_show, rule.allowed))
                yield f"{name}={_show(value)}: {rule.why}; only {works} works"
        elif name not in known and value is not None:
            yield f"{name}={_show(value)}: unknown here, so that it may mean another network; remove it if it does not"


def _obstacles(arch: Architecture, dialect: ModelType) -> Iterator[str]:
    """What keeps a model from being one of this type."""
    for name, trait in dialect.traits.items():
        if getattr(arch, name) != trait:
            yield f"{name}={_show(getattr(arch, name))}: {dialect.class_name} has {_show(trait)}"
    known = tuple(dict.fromkeys(dialect.activation[2].values()))
    if arch.activation not in known:
        yield f"activation={arch.activation}: {dialect.class_name} has {' or '.join(known)}"
    yield from dialect.demands(arch)


def _unsaid(arch: Architecture, dialect: ModelType) -> Iterator[str]:
    """What matters for further training only, and has no field."""
    said = {*dialect.keys, *dialect.traits, "activation", "padded_vocab_size", "num_query_groups", "kv_channels"}
    said |= set() if dialect.has_rope else {"rotary_base"}
    for name in (field.name for field in fields(arch) if field.name not in said):
        value, silent = getattr(arch, name), {"hidden_dropout": 0.0, "seq_length": arch.max_position_embeddings}[name]
        if value != silent:
            yield f"model.{name}={_show(value)} has no field in config.json; a conversion back will say {_show(silent)}"


def _wrong(dialect: ModelType, place: tuple[int | str, ...], rule: str, values: HubConfig) -> str:
    """The message for a field whose value our schema refuses."""
    ours = str(place[0])
    theirs = dialect.keys[ours].names[0] if ours in dialect.keys else ours
    return f"config.json: {theirs}={_show(values.get(ours))}: {rule[0].lower()}{rule[1:]}"


def _show(value: object) -> str:
    return json.dumps(value)
