"""Base of all sections of the configuration, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from megatron3d.foreign_text import is_one_line

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, types are not converted, and values cannot be changed.

    Text has at least one character and none that would harm a terminal, a log or a job script.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1)

    @field_validator("*")
    @classmethod
    def _is_printable(cls, value: object) -> object:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not is_one_line(text):
                raise ValueError("control characters")
        return value
