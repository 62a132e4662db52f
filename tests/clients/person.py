"""The class whose objects structured output gives. Its texts are short: a model of this size finds no end by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]
    role: Literal["admin", "user"]
