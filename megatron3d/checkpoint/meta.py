"""Metadata of a training run's checkpoint: its model, its identity, its place in the run and in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from megatron3d.checkpoint.index import Count, Index, read_index
from megatron3d.data.corpus.stream import Cursor
from megatron3d.errors import UserError


class Meta(BaseModel):
    """Metadata of a checkpoint; `config` and `mesh` are those of the run that wrote it.

    `model_type` is that of the Hugging Face folder that the run's weights come from, empty where there is none.
    """

    model_config = ConfigDict(strict=True)

    model: dict[str, JsonValue]
    identity: dict[str, JsonValue]
    iteration: Count
    consumed_samples: Count
    optimizer_steps: Annotated[FiniteFloat, Field(ge=0)]
    loss_scale: dict[str, FiniteFloat] = {}
    cursors: dict[str, Annotated[list[Count], Field(max_length=len(Cursor._fields))]] = {}
    config: dict[str, JsonValue] = {}
    mesh: dict[str, int] = {}
    versions: dict[str, str] = {}
    model_type: str = ""


def read_meta(folder: Path) -> Meta:
    """Return the metadata of a checkpoint; raises UserError if it is not one of a training run."""
    return meta_of(folder, read_index(folder))


def meta_of(folder: Path, index: Index) -> Meta:
    """Return the metadata in an index; raises UserError if it is not one of a training run."""
    try:
        return Meta.model_validate(index.meta)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise UserError(f"{folder}: its index is of no training run ({places}); load another checkpoint") from error
