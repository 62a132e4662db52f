"""The real application on a real loopback socket, real catalog and registry, a mock engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from safetensors.numpy import save_file

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.sources.table import SourceTable, build_sources
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.model_spec import KernelDescription, LinearShape, ModelSpec
from lora_serve.server.app import build_app
from lora_serve.server.background.caller_texts import AdapterTemplates, GrammarChecks
from lora_serve.server.background.tasks import Staging
from lora_serve.server.services import Services
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.telemetry.metrics import Metrics
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.authenticator import Authenticator, KeyTable
from lora_serve.tenancy.directory import Directory, open_directory
from lora_serve.text.adapter_template import TemplateProcesses, base_templates
from lora_serve.text.tokenizer import TextModel
from tests.fake_verifier import FakeVerifier
from tests.mock_engine import MockEngineClient
from tests.server.answer_schemas import AnswerWatch
from tests.text.tiny_tokenizer import byte_level_tokenizer
from tests.verifying_registry import VerifyingRegistry

BASE = "tiny-base"
KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
LAYERS = 2
HIDDEN = 8


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return TextModel(byte_level_tokenizer())


@pytest.fixture
def spec(text_model: TextModel) -> ModelSpec:
    linears = {f"model.layers.{layer}.self_attn.q_proj": LinearShape(HIDDEN, HIDDEN) for layer in range(LAYERS)}
    end = text_model.wrapper.convert_tokens_to_ids("<|end|>")
    vocab_size = text_model.vocab_size
    kernels = KernelDescription("none", "float32", "none", "torch", "/a/path/of/this/machine")
    return ModelSpec(
        BASE, "LlamaForCausalLM", vocab_size, 128, (end,), LAYERS, linears, 0, "float32", "cpu", kernels=kernels
    )


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """make_adapter(name, seed) -> a PEFT folder inside the allowed root; another seed is other content.

    `settings` go into its config as they are; with `use_dora` it has magnitudes too.
    """

    def make(name: str = "adapter", seed: int = 0, rank: int = 2, **settings: Any) -> Path:
        folder = tmp_path / "root" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], **settings}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        random = np.random.default_rng(seed)
        tensors = {}
        for layer in range(LAYERS):
            path = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            tensors[f"{path}.lora_A.weight"] = random.standard_normal((rank, HIDDEN), dtype=np.float32)
            tensors[f"{path}.lora_B.weight"] = random.standard_normal((HIDDEN, rank), dtype=np.float32)
            if settings.get("use_dora"):
                tensors[f"{path}.lora_magnitude_vector"] = np.ones(HIDDEN, dtype=np.float32)
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return make


@dataclass(frozen=True)
class House:
    """The running server, and what is behind it."""

    services: Services
    engine: MockEngineClient
    verifier: FakeVerifier
    url: str
    root: Path
    store: Path
    make_adapter: Callable[..., Path]

    async def register(
        self, name: str, seed: int = 0, settings: dict[str, Any] | None = None, **options: Any
    ) -> AdapterRef:
        """Through the registry, on its own thread. `settings`: of the adapter's config."""
        folder = self.make_adapter(name.replace("/", "-"), seed, **(settings or {}))
        registry = self.services.registry
        done = await self.services.registrations.run(lambda: registry.register_folder(name, folder, **options))
        return done.ref


@pytest.fixture
def server_config() -> ServerConfig:
    return ServerConfig(model="", served_model_name=(BASE,), max_body_size=100_000)


@pytest.fixture
def auth_required() -> bool:
    return False


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = open_catalog(tmp_path / "store")
    yield catalog
    catalog.close()


@pytest.fixture
def directory(catalog: Catalog, adapter_config: AdapterConfig) -> Iterator[Directory]:
    with open_directory(adapter_config) as directory:
        yield directory


@pytest.fixture
def adapter_config(tmp_path: Path) -> AdapterConfig:
    root, store = tmp_path / "root", tmp_path / "store"
    root.mkdir(exist_ok=True)
    return AdapterConfig(
        store=store,
        adapter_root=(root,),
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=1_000_000,
        base_name="tests/tiny-base",
    )


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest.fixture
def sources() -> Callable[[AdapterConfig], SourceTable]:
    """How the table of sources is built."""
    return build_sources


@pytest.fixture
async def services(
    text_model: TextModel,
    spec: ModelSpec,
    catalog: Catalog,
    directory: Directory,
    verifier: FakeVerifier,
    adapter_config: AdapterConfig,
    server_config: ServerConfig,
    auth_required: bool,
    sources: Callable[[AdapterConfig], SourceTable],
) -> AsyncIterator[Services]:
    async with opened_services(
        text_model, spec, catalog, directory, verifier, adapter_config, server_config, auth_required, sources
    ) as made:
        yield made


@asynccontextmanager
async def opened_services(
    text_model: TextModel,
    spec: ModelSpec,
    catalog: Catalog,
    directory: Directory,
    verifier: FakeVerifier,
    config: AdapterConfig,
    server_config: ServerConfig,
    auth_required: bool,
    sources: Callable[[AdapterConfig], SourceTable] = build_sources,
) -> AsyncIterator[Services]:
    """The parts of an application over a mock engine."""
    keys = KeyTable(directory)
    engine = MockEngineClient(spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    await engine.start()
    base_tokens = BaseTokens(text_model.vocabulary())
    processes = TemplateProcesses()
    templates = base_templates(text_model, spec, processes, config.adapter_chat_templates)
    store = DiskStore(config.store)
    registry = VerifyingRegistry(config, spec, catalog, store, verifier, base_tokens, directory.quota_of, templates)
    made = Services(
        client=engine,
        catalog=catalog,
        registry=registry,
        verifier=verifier,
        staging=Staging(sources(config), registry.new_folder, config.max_upload_size),
        text=text_model,
        grammars=GrammarChecks(text_model, server_config),
        spec=spec,
        config=server_config,
        adapter_config=config,
        authenticator=Authenticator(AdminKey.of(KEY), auth_required, keys),
        keys=keys,
        metrics=Metrics(BASE),
        templates=AdapterTemplates(processes),
    )
    made.lifecycle.ready()
    yield made
    made.staging.close()
    await made.background.close()
    made.registrations.close()
    made.grammars.close()
    made.templates.close()
    made.large_bodies.close()


@pytest.fixture
async def house(
    services: Services, verifier: FakeVerifier, tmp_path: Path, make_adapter: Callable[..., Path]
) -> AsyncIterator[House]:
    async with opened_house(services, verifier, tmp_path, make_adapter) as house:
        yield house


@asynccontextmanager
async def opened_house(
    services: Services, verifier: FakeVerifier, tmp_path: Path, make_adapter: Callable[..., Path]
) -> AsyncIterator[House]:
    """The application on a socket of its own."""
    app, watch = build_app(services), AnswerWatch()
    watch.watch(app)
    runner = HttpRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    assert isinstance(services.client, MockEngineClient)
    url = f"http://127.0.0.1:{port}"
    yield House(services, services.client, verifier, url, tmp_path / "root", tmp_path / "store", make_adapter)
    await runner.cleanup()
    assert watch.faults == [], "answers that /openapi.json does not promise"


@pytest.fixture
async def http(house: House) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(house.url) as session:
        yield session


@pytest.fixture
async def admin(house: House) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(house.url, headers=ADMIN) as session:
        yield session


@pytest.fixture
async def openai(house: House) -> AsyncIterator[AsyncOpenAI]:
    http = DefaultAsyncHttpxClient(verify=False)  # http: reading the system's certificates would take 20 ms
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
def ids(text_model: TextModel) -> Callable[[str], tuple[int, ...]]:
    """Token ids of a text, special tokens in it understood, none added."""
    return lambda text: text_model.encode(text, add_special_tokens=False)


async def leave_in_the_middle(http: aiohttp.ClientSession, house: House, model: str | None = None) -> None:
    """Ask for a completion and hang up once the engine has it."""
    body = {"prompt": "x"} if model is None else {"prompt": "x", "model": model}
    known = len(house.engine.requests)
    task = asyncio.create_task(http.post("/v1/completions", json=body).__aenter__())
    async with asyncio.timeout(60):
        while len(house.engine.requests) == known:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
