"""The bases of the schemas of answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """The base of all of them: an answer may hold more, as later versions will."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Page(Answer):
    """A list that is answered in pages; `last_id` is the `after` of the next."""

    object: Literal["list"]
    has_more: bool
    last_id: str | None


class Deleted(Answer):
    deleted: Literal[True]
