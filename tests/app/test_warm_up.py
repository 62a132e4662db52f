"""What has run before the server says that it is ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.content import dummy_adapter_ref
from lora_serve.app import warm_up
from lora_serve.app.warm_up import TEXT_ID
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import EngineConfig, ServerConfig
from lora_serve.core.errors import ConfigError, InternalError
from lora_serve.core.messages import Evict, Pin
from lora_serve.core.model_spec import ModelSpec, PoolingSpec
from lora_serve.core.request import Task
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.settings import Settings
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine.warmup import warmup_stages
from lora_serve.server.lifecycle import EngineHistory
from lora_serve.text.tokenizer import TextModel
from lora_serve.text.tool_calls import tool_call_format
from tests.mock_engine import MockEngineClient, MockReply
from tests.text.tiny_tokenizer import byte_level_tokenizer


@pytest.fixture
async def engine() -> MockEngineClient:
    mock = MockEngineClient(vocab_size=300)
    await mock.start()
    return mock


async def warmed(engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[str]:
    """Ids of the requests that ran, in their order."""
    text = TextModel(byte_level_tokenizer())
    pooling = fields.pop("pooling", None)
    spec = ModelSpec("fake", "Fake", text.vocab_size, 128, (), 1, {}, 0, "float32", "cpu", pooling=pooling)
    settings = Settings(model="fake", max_num_seqs=4, **fields)
    services: Any = SimpleNamespace(
        client=engine, spec=spec, text=text, catalog=SimpleNamespace(snapshot=None), history=EngineHistory(),
        config=settings.part(ServerConfig),
    )  # fmt: skip
    await warm_up.warm_up(services, settings)
    planned = warmup_stages(settings.warmup, spec, settings.part(EngineConfig), dummy_adapter_ref(spec))
    expected = [request for stage in planned for request in stage.requests]
    ran = [replace(request, arrival_time=0.0) for request in engine.requests]
    assert ran[: len(expected)] == expected, "the plan is what ran"
    assert all(request.arrival_time > 0 for request in engine.requests), "latency targets see how long each took"
    return [request.request_id for request in engine.requests[len(expected) :]]


@pytest.mark.parametrize("mode", ["auto", "full"])
async def test_the_plan_runs_then_a_text_and_the_dummy_adapter_leaves(
    engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    assert await warmed(engine, monkeypatch, warmup=mode) == ["warm-up-grammar", TEXT_ID]
    text = TextModel(byte_level_tokenizer())
    assert "Dear customer" in text.decode(engine.requests[-1].prompt_token_ids)
    assert isinstance(engine.commands[-1], Evict)
    assert engine.gate.num_requests == 0


async def test_off_runs_nothing(engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await warmed(engine, monkeypatch, warmup="off") == []
    assert engine.requests == []


async def test_queue_smaller_than_a_stage_does_not_refuse_it(
    engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.gate = QueueGate(QueueLimits(max_queue=1))
    assert await warmed(engine, monkeypatch, warmup="full") == ["warm-up-grammar", TEXT_ID]


async def test_stop_string_in_the_text_ends_it_early(engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    newline = TextModel(byte_level_tokenizer()).encode("\n", False)[0]
    engine.script = lambda request: MockReply(token_ids=[newline] * 8)
    assert await warmed(engine, monkeypatch) == ["warm-up-grammar", TEXT_ID]
    assert engine.aborted == [TEXT_ID]


async def test_tokenizer_that_grammars_cannot_use_does_not_end_the_start(
    engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = MockReply(error=InternalError("The grammar could not be compiled."))
    engine.script = lambda request: failed if request.grammar else MockReply(token_ids=[5] * 8)
    assert await warmed(engine, monkeypatch) == ["warm-up-grammar", TEXT_ID]
    assert "there is no structured output" in caplog.text


async def test_pooling_model_is_asked_for_vectors_only(
    engine: MockEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await warmed(engine, monkeypatch, pooling=PoolingSpec(Task.EMBED, 8)) == []
    assert all(request.pooling is not None for request in engine.requests)


async def test_module_that_cannot_be_registered_ends_the_start_and_the_warm_up_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def refuse(services: Any, modules: tuple[str, ...]) -> None:
        raise ConfigError(f"--lora-modules {modules[0]}: no")

    async def endless(services: Any, settings: Settings, is_warm: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("warm-up")

    monkeypatch.setattr(warm_up, "register_modules", refuse)
    monkeypatch.setattr(warm_up, "warm_up", endless)
    services: Any = SimpleNamespace(history=EngineHistory())
    with pytest.raises(ConfigError, match="a=b: no"):
        await warm_up.prepare(services, Settings(model="fake", lora_modules=("a=b",)))
    assert ended == ["warm-up"]


async def test_pinned_adapters_are_loaded_after_registration_and_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        async def call(*_: Any) -> None:
            await asyncio.sleep(0)
            order.append(name)

        return call

    for name in ("register_modules", "warm_up", "load_pinned"):
        monkeypatch.setattr(warm_up, name, note(name))
    services: Any = SimpleNamespace(history=EngineHistory())
    await warm_up.prepare(services, Settings(model="fake"))
    assert order == ["register_modules", "warm_up", "load_pinned"]


async def test_later_engine_gets_what_was_pinned_while_there_was_none(engine: MockEngineClient) -> None:
    """The command itself failed then, and nobody gives it again."""
    entries: dict[str, Any] = {}
    pinned: set[str] = set()
    services: Any = SimpleNamespace(
        client=engine,
        spec=ModelSpec("fake", "Fake", 300, 128, (), 1, {}, 0, "float32", "cpu"),
        catalog=SimpleNamespace(snapshot=SimpleNamespace(entries=entries, pinned=pinned)),
        keys=SimpleNamespace(directory=SimpleNamespace(snapshot=SimpleNamespace(tenants={}))),
    )
    preparation = warm_up.Preparation(services, Settings(model="fake", warmup="off"))
    await preparation.run()
    pinned.add("acme/a")
    ref = AdapterRef("acme", "acme/a", 1, "sha256:a", 4, 100)
    entries["acme/a"] = SimpleNamespace(pinned=True, routed=(ref,), ref=lambda version: version)
    pinned.add("acme/a")
    engine.commands.clear()
    await preparation.run()
    assert Pin(ref) in engine.commands
    await preparation.close()


def test_start_says_in_which_formats_chats_are_read() -> None:
    template = SimpleNamespace(call_format=tool_call_format("hermes"), reasoning_format=None)
    config = SimpleNamespace(tool_call_parser="auto", reasoning_parser="auto")
    services: Any = SimpleNamespace(text=SimpleNamespace(template=template), config=config)
    assert warm_up._formats_note(services) == "tool calls: hermes (by the template); reasoning: none (by the template)"
    config.tool_call_parser, config.reasoning_parser = "mistral", "none"
    assert warm_up._formats_note(services) == "tool calls: mistral; reasoning: none"
