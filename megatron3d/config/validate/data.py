"""Rules of the data section: paths, blends, splits and streaming; `files.py` checks the files themselves."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.validate.facts import Facts, plain
from megatron3d.data.corpus.blend import parse_paths
from megatron3d.data.corpus.samples import parse_split
from megatron3d.data.preprocess.hub_datasets import HF_PREFIX
from megatron3d.errors import UserError

PATH_KEYS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def data_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per broken rule of the data section."""
    data = facts.config.data
    yield from _split_problems(facts) if data.train_data_path is None else _path_problems(facts)
    for key in PATH_KEYS[2:]:
        if getattr(data, key) is not None and data.train_data_path is None:
            where = facts.named(f"data.{key}")
            yield f"{where}: not used without data.train_data_path; give that in place of data_path, or leave {key} out"
    for key in PATH_KEYS:
        if (value := getattr(data, key)) is not None:
            try:
                parse_paths(f"data.{key}", value)
            except UserError as error:
                rule = str(error).partition(": ")[2]
                yield f"{facts.named(f'data.{key}')}: {rule}"
    yield from _stream_problems(facts)
    if data.reset_position_ids and facts.arch.position_embedding_type == "none":
        yield f"{facts.named('data.reset_position_ids')}: the model has no positions; use false"
    if data.mean_document_length is not None and not data.reset_attention_mask:
        where = facts.named("data.mean_document_length")
        yield f"{where}: not used without data.reset_attention_mask=true; give that, or leave mean_document_length out"
    if data.goldfish_k is None and data.goldfish_h != type(data).model_fields["goldfish_h"].default:
        yield f"{facts.named('data.goldfish_h')}: not used without data.goldfish_k; give that, or leave goldfish_h out"


def _stream_problems(facts: Facts) -> Iterator[str]:
    data = facts.config.data
    given = {key: value for key in PATH_KEYS if (value := getattr(data, key)) is not None}
    for key, value in given.items():
        if isinstance(value, tuple) and any(str(word).startswith(HF_PREFIX) for word in value):
            yield (
                f"{facts.named(f'data.{key}')}: a streamed dataset cannot be blended; "
                "name it alone, or make token files of it"
            )
    if isinstance(data.data_path, str) and data.data_path.startswith(HF_PREFIX):
        where = facts.named("data.data_path")
        yield f"{where}: a streamed dataset cannot be split; use data.train_data_path and data.valid_data_path"
    if not any(str(value).startswith(HF_PREFIX) for value in given.values()):
        for key in ("stream_key", "stream_lanes", "stream_shuffle_rows", "on_bad_record"):
            if getattr(data, key) != type(data).model_fields[key].default:
                where = facts.named(f"data.{key}")
                yield f"{where}: not used without a path that begins with {HF_PREFIX}; give one, or leave {key} out"


def _split_problems(facts: Facts) -> Iterator[str]:
    config = facts.config
    try:
        train, valid, _ = parse_split(config.data.split)
    except UserError:
        yield f"{facts.named('data.split')}: not three weights of at least 0 for train, valid and test; use 969,30,1"
        return
    if not train:
        yield f"{facts.named('data.split')}: nothing is left to train on; use for example 969,30,1"
    if config.train.eval_interval and not valid:
        yield (
            f"{facts.named('data.split')}: no validation split for {plain(config, 'train.eval_interval')}; "
            "use for example 90,10,0, or eval_interval null"
        )


def _path_problems(facts: Facts) -> Iterator[str]:
    config = facts.config
    if config.data.data_path is not None:
        yield f"{facts.named('data.data_path')}: not used with data.train_data_path; leave one of them out"
    if config.data.split != type(config.data).model_fields["split"].default:
        yield f"{facts.named('data.split')}: not used with data.train_data_path; leave it out"
    if config.train.eval_interval and config.data.valid_data_path is None:
        where = facts.named("data.train_data_path")
        yield (
            f"{where}: no validation data for {plain(config, 'train.eval_interval')}; "
            "add data.valid_data_path, or use eval_interval null"
        )
