"""A real server process on a tiny model, for the tests of all files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from lora_serve.commands.server_process import ServerProcess
from tests.oracle import save_adapter, save_tiny_model
from tests.text.tiny_tokenizer import byte_level_tokenizer

KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
NAMES = ("acme/a", "acme/b", "globex/c", "globex/d")


@dataclass(frozen=True)
class Site:
    """Files that a server needs."""

    model: Path
    adapters: dict[str, Path]
    root: Path

    def arguments(self, store: str = "store", *more: str) -> list[str]:
        """Flags for `serve`."""
        return [
            "--model", str(self.model), "--served-model-name", "tiny", "--admin-key", KEY,
            "--store", str(self.root / store), "--adapter-root", str(self.root),
            "--max-model-len", "96", "--kv-cache-memory", "4MiB", "--max-loras", "4", *more,
        ]  # fmt: skip


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    root = tmp_path_factory.mktemp("site")
    tokenizer = byte_level_tokenizer()
    model = save_tiny_model("llama", root / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    adapters = {
        name: save_adapter(model, root / "adapters" / name, seed=seed, r=2 << seed % 3, lora_alpha=8)
        for seed, name in enumerate(NAMES)
    }
    return Site(model, adapters, root)


@pytest.fixture(scope="session")
def server(site: Site) -> Iterator[ServerProcess]:
    modules = [f"{name}={folder}" for name, folder in site.adapters.items()]
    with ServerProcess(
        [*site.arguments("store", "--max-num-batched-tokens", "64"), "--lora-modules", *modules], site.root / "log"
    ) as process:
        process.wait_until_ready(90)
        yield process


@pytest.fixture
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
