"""Write the configuration of a run that starts from a Hugging Face folder: its model, tokenizer and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron3d.config.io_schema import CheckpointConfig, DataConfig
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import Config
from megatron3d.config.section import Section
from megatron3d.convert.config_json import model_type_of, read_settings
from megatron3d.convert.conversion import ConversionReport, ConversionRequest, stored_precision
from megatron3d.convert.hub_weights import HubWeights, refuse_code, without_absent_modules
from megatron3d.convert.output_files import read_json, source_file
from megatron3d.convert.tokenizer_files import folder_tokenizer
from megatron3d.errors import UserError
from megatron3d.model.flops import num_parameters
from megatron3d.runtime.files import write_text


def write_start(request: ConversionRequest) -> ConversionReport:
    """Write the keys that follow from a folder to a YAML file; the run's data, layout and optimizer remain to be set.

    Raises UserError with every problem of config.json and of the weight files, whose values are not read.
    """
    settings = read_json(source_file(request.source, "config.json"))
    code = refuse_code(request.source, settings)
    if request.target.exists():
        raise UserError(f"--output {request.target}: exists already; name a new file, or remove it")
    model, absent = without_absent_modules(request.source, read_settings(settings, request.seq_length))
    arch, model_type = resolve_architecture(model, model.vocab_size or 0), model_type_of(settings)
    weights = HubWeights(request.source, arch, model_type)
    found = (request.tokenizer_type, request.tokenizer_model) if request.tokenizer_type else None
    kind, file = found or folder_tokenizer(request.source) or (None, None)
    train = Config().train.model_copy(update={"precision": stored_precision(weights, request.dtype)})
    data = DataConfig.model_validate({"tokenizer_type": kind, "tokenizer_model": file} if kind else {})
    checkpoint = CheckpointConfig(load=str(request.source), finetune=True)
    title = f"# Starts with the weights of {request.source}: {model_type}, {num_parameters(arch):,} parameters."
    sections = {"model": model, "train": train, "data": data, "checkpoint": checkpoint}
    lines = [title, *(line for name, section in sections.items() for line in _lines(name, section))]
    write_text(request.target, "\n".join(lines) + "\n")
    missing = "" if kind else "; it has no tokenizer: set data.tokenizer_type and data.tokenizer_model"
    return ConversionReport(
        (*code, *absent, f"set data.data_path, checkpoint.save, the layout and the optimizer{missing}")
    )


def _lines(name: str, section: Section) -> Iterator[str]:
    """Yield a section with its keys that are not at their default, as YAML."""
    values = section.model_dump(mode="json", exclude_defaults=True)
    if values:
        yield from ("", f"{name}:", *(f"  {key}: {json.dumps(value)}" for key, value in values.items()))
