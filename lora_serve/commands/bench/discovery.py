"""Asks a server for its models, adapters and vocabulary. What it does not tell stays empty."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lora_serve.commands.bench.sending import open_session
from lora_serve.commands.bench.workload import FIRST_TOKEN_ID
from lora_serve.core.errors import ConfigError

SECONDS = 60.0  # for each question
NUM_WORDS = 96  # that texts are made of
# for servers that spell no token; each is one token of most vocabularies
_ENGLISH = (
    "the of and to in is that it for was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
PLAIN_WORDS = tuple(_ENGLISH.split())


@dataclass(frozen=True, slots=True)
class ServerFacts:
    base: str | None = None
    adapters: tuple[str, ...] = ()  # in the server's order
    adapter_ids: Mapping[str, int] = field(default_factory=dict)  # llama.cpp's
    vocab_size: int | None = None
    max_model_len: int | None = None
    engine: str | None = None
    version: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)  # ours only: level, dtype, order, source


async def discover(root: str, api_key: str | None) -> ServerFacts:
    """Asks the server. Raises ConfigError if no server answers."""
    async with open_session() as http:
        server = _Server(http, root, api_key)
        if (listed := await server.get("/v1/models", must_answer=True)) is None:
            return ServerFacts()
        cards = [card for card in listed.get("data") or [] if isinstance(card, dict)]
        base = next((card for card in cards if not card.get("parent")), {})
        about, version, lora = await asyncio.gather(
            server.get("/tokenizer_info"), server.get("/version"), server.get("/lora-adapters")
        )
    ids = {_stem(item): int(item["id"]) for item in lora if "id" in item} if isinstance(lora, list) else {}
    meta = base.get("meta") or {}
    return ServerFacts(
        base.get("id"),
        tuple(card["id"] for card in cards if card.get("parent")) or tuple(ids),
        ids,
        _whole(_of(about, "vocab_size") or meta.get("n_vocab")),
        _whole(base.get("max_model_len")),
        base.get("owned_by"),
        _of(version, "version"),
        _texts(_of(version, "kernels")),
    )


async def find_words(root: str, api_key: str | None, vocab_size: int | None, seed: int) -> tuple[str, ...]:
    """Words that are mostly one token each, as the server's /detokenize spells them; else common English ones."""
    if vocab_size is None:
        return PLAIN_WORDS
    generator = random.Random(f"{seed} words")
    ids = [generator.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(NUM_WORDS)]
    async with open_session() as http:
        server = _Server(http, root, api_key)
        spelled = await asyncio.gather(*(server.spell(token_id) for token_id in ids))
    words = {text.strip() for text in spelled}
    usable = tuple(
        sorted(word for word in words if word.isprintable() and word and " " not in word and "<" not in word)
    )
    return usable if len(usable) >= NUM_WORDS // 4 else PLAIN_WORDS


@dataclass(frozen=True, slots=True)
class _Server:
    http: aiohttp.ClientSession
    root: str
    api_key: str | None

    async def get(self, path: str, must_answer: bool = False) -> Any:
        """The answer's JSON, or None. Raises ConfigError if `must_answer` and no server is there."""
        try:
            return await self._json("GET", path, None)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if must_answer:
                raise ConfigError(f"--url {self.root}: {error or type(error).__name__}") from error
            return None

    async def spell(self, token_id: int) -> str:
        try:
            answer = await self._json("POST", "/detokenize", {"tokens": [token_id]})
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""
        return str(_of(answer, "prompt") or _of(answer, "content") or "")

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        async with (
            asyncio.timeout(SECONDS),
            self.http.request(method, self.root + path, json=body, headers=headers) as response,
        ):
            if response.status in (401, 403) and path == "/v1/models":
                raise ConfigError(f"--url {self.root}: the server wants another --api-key ({response.status})")
            if response.status != 200 or "json" not in response.content_type:
                return None
            return await response.json()


def _of(document: Any, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None


def _texts(document: Any) -> dict[str, str]:
    """The fields that are texts."""
    items = document.items() if isinstance(document, dict) else ()
    return {name: value for name, value in items if isinstance(value, str)}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _stem(item: dict[str, Any]) -> str:
    """The file's name without its ending, by which llama.cpp names an adapter."""
    return str(item.get("path", item["id"])).rpartition("/")[2].removesuffix(".gguf")
