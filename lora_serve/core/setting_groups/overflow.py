"""Overflow: requests that would wait here for long are computed by neighbours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lora_serve.core.model_map import Pairs, parse_model_map
from lora_serve.core.setting_texts import check_key, is_web_url
from lora_serve.core.setting_types import Texts, setting

MAX_NEIGHBOURS = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class OverflowConfig:
    """Neighbours that compute what would wait here for long."""

    overflow: Annotated[Texts, AfterValidator(_check_neighbours)] = setting(
        (),
        "URL, or NAME=URL, of another OpenAI-compatible server with the same base model and adapters: it "
        "computes requests that would wait here for long; repeatable",
    )
    overflow_after_ms: float = setting(
        1000.0,
        "milliseconds of predicted wait beyond which a request goes to a neighbour of --overflow",
        ge=0,
        le=3_600_000,
    )
    overflow_model_map: Annotated[Pairs, BeforeValidator(parse_model_map)] = setting(
        (),
        "pair NAME=NAME of a model here and at the neighbours (`*` stands for any text), or a JSON or YAML "
        "file of them; only what is named leaves; default: all models, under their own names; repeatable",
    )
    overflow_api_key: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(check_key)] | None = setting(
        None, "bearer key that the neighbours of --overflow are shown", repr=False
    )
    overflow_timeout_ms: float = setting(
        10_000.0,
        "milliseconds that a neighbour's first token may take at most; then the request is computed here",
        ge=100,
        le=3_600_000,
    )
    overflow_gap_ms: float = setting(
        10_000.0,
        "milliseconds between two tokens of a neighbour at most; then its answer is broken off",
        ge=10,
        le=3_600_000,
    )
    overflow_answer_ms: float = setting(
        600_000.0, "milliseconds that the whole answer of a neighbour may take", ge=100, le=86_400_000
    )

    @property
    def neighbours(self) -> tuple[tuple[str, str], ...]:
        """Name and URL of each; none: nothing leaves."""
        return tuple(map(neighbour_in, self.overflow))

    def check_overflow_together(self) -> None:
        """Raises ValueError."""
        for field in () if self.overflow else fields(OverflowConfig):
            if getattr(self, field.name) != field.default:
                raise ValueError(f"--overflow: is required with --{field.name.replace('_', '-')}")


def _check_neighbours(value: tuple[str, ...]) -> tuple[str, ...]:
    neighbours = [neighbour_in(text) for text in value]
    if len(neighbours) > MAX_NEIGHBOURS:
        raise ValueError(f"expected at most {MAX_NEIGHBOURS} neighbours")
    for kind, found in (("name", [name for name, _ in neighbours]), ("URL", [url for _, url in neighbours])):
        if len(set(found)) < len(found):
            raise ValueError(f"two neighbours have one {kind}")
    return value


def neighbour_in(text: str) -> tuple[str, str]:
    """Name and URL in `URL` or `NAME=URL`; the name of a bare URL is its host and port. Raises ValueError."""
    name, equals, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    parts = urlsplit(url) if is_web_url(url) else None
    if parts is None or not text.isascii() or " " in text or parts.query or parts.fragment:
        shown = text.rpartition("@")[2].partition("?")[0].partition("#")[0]  # a key may be in the rest
        raise ValueError(f"expected a URL such as http://10.0.0.7:8000, or NAME=URL, without a query: {shown!r:.200}")
    if "@" in parts.netloc:
        raise ValueError("a URL must hold no key: it goes into --overflow-api-key")
    if equals and not all(character.isalnum() or character in "._-" for character in name):
        raise ValueError(f"a neighbour's name has letters, digits and `._-` only: {name!r:.100}")
    return name or parts.netloc, url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_address_of(url: str, host: str, port: int) -> bool:
    """True if the URL is plainly that of a server that listens on `host` and `port`."""
    parts = urlsplit(url)
    there = parts.port or (443 if parts.scheme == "https" else 80)
    listens_here = host in (*_LOOPBACK, "0.0.0.0", "::", "")
    return there == port and (parts.hostname == host or (listens_here and parts.hostname in _LOOPBACK))
