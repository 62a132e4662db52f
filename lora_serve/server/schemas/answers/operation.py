"""Answers of probes."""

from __future__ import annotations

from typing import Any, Literal

from lora_serve.server.schemas.answers.base import Answer


class Health(Answer):
    status: Literal["ok"]
    state: str


class Readiness(Answer):
    status: Literal["ready"]
    read_only: bool = False
    reason: str | None = None


class Version(Answer):
    version: str


class OpenApiDocument(Answer):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
