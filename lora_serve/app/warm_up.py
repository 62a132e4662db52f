"""The work between listening and /ready: `--lora-modules`, warm-up rows, pinned adapters, hot ones."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import Progress

from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import FOLDER
from lora_serve.adapters.checkpoint.content import dummy_adapter_ref
from lora_serve.adapters.registration.registry import Registered, private_folder
from lora_serve.adapters.sources.base import RegistrationProgress, Stage, Staged
from lora_serve.adapters.sources.folder import copy_files
from lora_serve.app.warm_set import WarmSetKeeper
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    LoraServeError,
    StoreUnwritableError,
    UnreadableRecordError,
)
from lora_serve.core.messages import Event, Evict, FinishEvent, Pin, TokenEvent, TokenLogprobs
from lora_serve.core.request import InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.core.tenant import WARM_UP
from lora_serve.engine.warmup import WarmupStage, grammar_stage, warmup_stages
from lora_serve.logs import timed
from lora_serve.model.system.process import return_freed_memory
from lora_serve.server.admin.registration import register, with_quota
from lora_serve.server.answers import compact
from lora_serve.server.schemas.generated import TokenSpeller, chat_logprobs
from lora_serve.server.services import Services
from lora_serve.server.upkeep import budgets_of, pinned_refs
from lora_serve.text.chat import ChatMessage, render_chat
from lora_serve.text.output import OutputText, StopRules

LOOK_SECONDS = 1.0  # between two checks whether the store can be written
MODULE_SECONDS = 60.0  # at most between two tries when the store has too little space
PIN_SECONDS = 30.0  # at most that a restarted engine waits for pinned adapters
TEXT_ID = f"warm-up-text-{uuid.uuid4().hex}"  # other servers of a fleet warm up, too
_TEXT = "Dear customer, your invoice no. 2041 (EUR 17.50) was sent."
_NEW_TOKENS = 3
_log = logging.getLogger(__name__)


class Preparation:
    """Prepares each new engine for requests: the first one with everything, a restarted one with its warm-up.

    A restarted engine has already been sent what the last one held.
    """

    def __init__(self, services: Services, settings: Settings, is_warm: bool = False) -> None:
        """`is_warm`: the engine has run its rows by itself."""
        self._services = services
        self._settings = settings
        self._is_warm = is_warm
        self._keeping = AsyncExitStack()
        self._is_prepared = False

    async def run(self) -> None:
        """Returns when the engine may serve. Raises ConfigError, and NotReadyError if the engine ends meanwhile."""
        if self._is_prepared:
            with suppress(TimeoutError):  # among them those that were pinned while no engine ran
                async with asyncio.timeout(PIN_SECONDS):
                    await load_pinned(self._services)
            await warm_up(self._services, self._settings, self._is_warm)
            return
        if left := await prepare(self._services, self._settings, self._is_warm):
            task = asyncio.create_task(register_later(self._services, left), name="lora modules")
            self._keeping.callback(task.cancel)
        await self._keeping.enter_async_context(await hot_adapters(self._services, self._settings))
        self._is_prepared = True

    async def close(self) -> None:
        """Writes down the hot adapters for the last time."""
        await self._keeping.aclose()


async def prepare(services: Services, settings: Settings, is_warm: bool = False) -> tuple[str, ...]:
    """Registers the modules, warms up, loads pinned adapters; returns the modules left for later. Raises ConfigError.

    Registering takes turns between its thread, the disk and the engine, so the warm-up's steps run beside it.
    """
    modules = asyncio.ensure_future(_registered(services, settings.lora_modules))
    tasks: list[asyncio.Future[Any]] = [modules, asyncio.ensure_future(warm_up(services, settings, is_warm))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await load_pinned(services)
    return modules.result()


async def _registered(services: Services, modules: tuple[str, ...]) -> tuple[str, ...]:
    with services.history.stage("adapters of --lora-modules") if modules else nullcontext():
        return await register_modules(services, modules)


async def register_modules(services: Services, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Registers `--lora-modules NAME=SOURCE`; any path is allowed, as the operator names it. Raises ConfigError.

    Returns the modules that a store which cannot be written now did not take; all others are served meanwhile.
    """
    left = []
    for module in modules:
        name, _, source = module.partition("=")
        try:
            ref = await _register_module(services, name, source)
            _log.info("--lora-modules: %s is registered, of rank %d", ref.label, ref.rank)
        except StoreUnwritableError as error:
            left.append(module)
            _log.error("--lora-modules %s waits until the store can be written: %s", name, error)
        except UnreadableRecordError as error:
            _log.error("--lora-modules %s: %s", name, error)
        except LoraServeError as error:
            raise ConfigError(f"--lora-modules {module}: {error}") from error
        return_freed_memory()  # gives the memory of its files back before the next module is read
    return tuple(left)


async def register_later(services: Services, modules: tuple[str, ...]) -> None:
    """Registers the modules that `register_modules` returned, once the store can be written."""
    pause = LOOK_SECONDS
    while modules:
        await asyncio.sleep(pause)
        if services.store_problem is not None:
            continue
        try:
            modules = await register_modules(services, modules)
        except ConfigError as error:
            _log.error("%s", error)
            return
        pause = min(MODULE_SECONDS, 2 * pause)  # the store can be written, and has too little space yet


async def _register_module(services: Services, name: str, source: str) -> AdapterRef:
    registration = Registration(id=name, source=source, by_admin=True)
    with_quota(services, registration).check(services.catalog.snapshot)
    progress = RegistrationProgress(name, None, Stage.FETCHING)
    if "://" in source:
        staged = await services.staging.stage(source)
        call = functools.partial(register, services, registration, staged, progress)
    else:
        call = functools.partial(_register_folder, services, registration, progress)
    return (await services.registrations.run(call)).ref


def _register_folder(services: Services, registration: Registration, progress: RegistrationProgress) -> Registered:
    """Called on a thread of `registrations`."""
    with private_folder(services.registry.new_folder) as folder:
        copy_files(Path(registration.source), folder, services.adapter_config.max_upload_size, None)
        return register(services, registration, Staged(folder, f"{FOLDER}{registration.source}"), progress)


async def warm_up(services: Services, settings: Settings, is_warm: bool = False) -> None:
    """Runs dummy rows through the ordinary step, and one text through tokenizer, engine and detokenizer.

    `is_warm`: only the text, as the engine has run the rows.
    """
    if is_warm:
        if settings.warmup != "off":
            with _stage(services, "a text"):
                await _answer_text(services)
        return
    client, spec = services.client, services.spec
    dummy = dummy_adapter_ref(spec)
    stages = warmup_stages(settings.warmup, spec, settings.part(EngineConfig), dummy)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warm-up", total=len(stages))
        for stage in stages:
            progress.update(task, description=f"warm-up: {stage.name}")
            with _stage(services, stage.name):
                await _run_rows(client, stage)
            progress.advance(task)
        if stages:
            if spec.pooling is None:
                await _try_grammar(services, grammar_stage(spec, dummy))
            with _stage(services, "a text"):
                await _answer_text(services)
            await client.adapters(Evict(dummy.digest, forget=True))


@contextmanager
def _stage(services: Services, name: str) -> Iterator[None]:
    """One part of a warm-up, in the log and in the engine's history."""
    with timed(f"warm-up: {name}"), services.history.stage(name):
        yield


async def _try_grammar(services: Services, stage: WarmupStage) -> None:
    """A tokenizer that cannot be read for grammars takes only structured output away."""
    with _stage(services, stage.name):
        try:
            await _run_rows(services.client, stage)
        except (InvalidRequestError, InternalError) as error:
            _log.warning("there is no structured output: %s", error)


async def load_pinned(services: Services) -> None:
    """Loads the pinned adapters onto the device, after the engine knows the tenants' budgets; those that cannot be
    loaded are logged and left out.
    """
    await services.client.adapters(budgets_of(services))
    for ref in pinned_refs(services.catalog.snapshot).values():
        with timed(f"pinned adapter {ref.label}"):
            try:
                await services.client.adapters(Pin(ref))
            except LoraServeError as error:
                _log.error("the pinned adapter %s cannot be loaded: %s", ref.label, error)


async def hot_adapters(services: Services, settings: Settings) -> AbstractAsyncContextManager[None]:
    """Loads the last run's hot adapters onto the device; host memory's follow while the context lasts."""
    if settings.warmup == "off":
        return nullcontext()
    keeper = WarmSetKeeper(services.client, services.catalog, settings.part(AdapterConfig))
    with timed("hot adapters of the last run"), services.history.stage("hot adapters of the last run"):
        await keeper.warm_device()
    return keeper.keeping()


async def _run_rows(client: EngineClient, stage: WarmupStage) -> None:
    async def exhaust(request: InferenceRequest) -> None:
        now = time.monotonic()  # else its time to first token, which latency targets follow, would be the machine's age
        async for _ in client.infer(replace(request, arrival_time=now)):
            pass

    client.gate.enter(stage.requests, limited=False)
    await asyncio.gather(*map(exhaust, stage.requests))


async def _answer_text(services: Services) -> None:
    """Tokenise a text, and if the model generates: render, infer, detokenise, write. Not counted in metrics."""
    text, longest = services.text, services.spec.max_model_len - _NEW_TOKENS
    token_ids = text.encode(_rendered(services), add_special_tokens=True)[: max(1, longest)]
    if services.spec.pooling is not None or not token_ids or longest < 1:
        return
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
    request = InferenceRequest(TEXT_ID, token_ids, sampling, tenant=f"{WARM_UP}text", arrival_time=time.monotonic())
    services.client.gate.enter((request,), limited=False)
    output = OutputText(text, request, StopRules(("\n\n",)), services.spec.eos_token_ids)
    entries: list[TokenLogprobs] = []
    async with aclosing(cast(AsyncGenerator[Event, None], services.client.infer(request))) as events:
        async for event in events:
            if isinstance(event, TokenEvent) and event.logprobs is not None:
                entries.append(event.logprobs)
            if isinstance(event, TokenEvent | FinishEvent):
                piece = output.token(event) if isinstance(event, TokenEvent) else output.finish(event)
                if piece.finish_reason is not None:
                    break
    compact(chat_logprobs(TokenSpeller(text, as_ids=False), entries, 1))


def _rendered(services: Services) -> str:
    """The text, in the model's chat template if that takes a user's message."""
    if services.spec.pooling is None:
        _log.info("chat: %s", _formats_note(services))  # the formats' files are read once
        with suppress(InvalidRequestError):
            return render_chat(services.text, (ChatMessage("user", _TEXT),)).text
    return _TEXT


def _formats_note(services: Services) -> str:
    """The formats in which the base model's answers are read."""
    template, config = services.text.template, services.config
    found = {
        "tool calls": (config.tool_call_parser, template.call_format),
        "reasoning": (config.reasoning_parser, template.reasoning_format),
    }
    words = []
    for what, (asked, own) in found.items():
        name = type(own).__module__.rpartition(".")[2] if own else "none"
        words.append(f"{what}: {f'{name} (by the template)' if asked == 'auto' else asked}")
    return "; ".join(words)
