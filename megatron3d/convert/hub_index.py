"""A Hugging Face folder as a checkpoint: an index that leads from logical tensors to rows of the files' tensors.

    layers.0.attention.k.weight [H, H]  =  rows H to 2H of the transpose of h.0.attn.c_attn.weight in model.safetensors

Nothing is converted or copied: ranks read the boxes that they need from the mapped files, as from our checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megatron3d.checkpoint.index import Index, StoredBox, StoredTensor
from megatron3d.checkpoint.meta import Meta
from megatron3d.checkpoint.piece import dtype_name
from megatron3d.checkpoint.read import BoxFile
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import model_type_of, read_settings
from megatron3d.convert.hub_weights import HubWeights, refuse_code, view_of, without_absent_modules
from megatron3d.convert.output_files import read_json, source_file
from megatron3d.convert.tensor_names import Place
from megatron3d.convert.tokenizer_files import folder_tokenizer
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.model.architecture import Architecture, architecture_record


def weights_meta(arch: Architecture, tokenizer: str | None, model_type: str) -> Meta:
    """Return the metadata of a folder's weights; `tokenizer` is a fingerprint, None where it is not known."""
    return Meta(
        model=architecture_record(arch),
        identity={} if tokenizer is None else {"tokenizer": tokenizer},
        iteration=0,
        consumed_samples=0,
        optimizer_steps=0.0,
        model_type=model_type,
    )


def read_hub_index(folder: Path) -> Index:
    """Return the index of a Hugging Face folder, whose files are opened with `HubFile`.

    Raises UserError with every field of config.json that our model cannot represent, or every problem of the files.
    """
    settings = read_json(source_file(folder, "config.json"))
    refuse_code(folder, settings)
    (model, _), model_type = without_absent_modules(folder, read_settings(settings)), model_type_of(settings)
    arch = resolve_architecture(model, model.vocab_size or 0)
    weights = HubWeights(folder, arch, model_type)
    tensors: dict[str, StoredTensor] = {}
    for tensor in weights.table:
        stored = weights.stored(tensor.name)
        for rows in tensor.row_ranges():
            key = f"{_place_key(rows.place)}:{stored.name}"
            box = StoredBox.model_construct(None, box=rows.box, file=stored.file.name, key=key, checksum="")
            name = f"model.{rows.name}"
            others = tensors[name].boxes if name in tensors else ()
            dtype = dtype_name(stored.dtype)
            tensors[name] = StoredTensor.model_construct(None, shape=rows.shape, dtype=dtype, boxes=(*others, box))
    found = folder_tokenizer(folder)
    meta = weights_meta(arch, found and build_tokenizer(*found).fingerprint, model_type)
    return Index.model_construct(None, iteration=0, meta=meta.model_dump(), tensors=tensors)


class HubFile(BoxFile):
    """An open safetensors file of a Hugging Face folder; `read_hub_index` says which rows of its tensors a box is."""

    def box(self, file: Any, stored: StoredBox) -> Tensor:
        """Return rows of a tensor, memory-mapped from an open file."""
        *numbers, name = stored.key.split(":", len(Place._fields))
        start, step, column, expert, is_transposed = map(int, numbers)
        place = Place(start, step, column, expert, bool(is_transposed))
        (low, high), *others = stored.box
        shape = (high - low, *(end - begin for begin, end in others))
        return view_of(file.get_tensor(name), place, high - low, shape)


def _place_key(place: Place) -> str:
    return ":".join(str(int(number)) for number in place)
