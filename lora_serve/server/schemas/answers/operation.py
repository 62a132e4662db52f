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


class Kernels(Answer):
    """Fields of `KernelDescription`."""

    level: str
    dtype: str
    order: Literal["plain", "dot", "blocks", "none"]
    source: Literal["shipped", "compiled", "torch"]


class Version(Answer):
    version: str
    kernels: Kernels | None


class OpenApiDocument(Answer):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class Root(Answer):
    """GET /"""

    version: str
    links: dict[str, str]  # relative
    routes: list[str]  # of inference, as `POST /v1/completions`


class ConsoleFacts(Answer):
    """GET /ui/about.json"""

    version: str
    asks_for_key: bool  # also for inference
