"""The real engine on a real tiny model without threads: requests in, finished sequences out."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.adapters.checkpoint.weights import convert_to_plain_lora, read_weights
from lora_serve.adapters.registration.verification import traits_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.errors import InvalidAdapterError, LoraServeError
from lora_serve.core.messages import ErrorEvent, FinishEvent, PooledEvent, PromptEvent, TokenEvent, TokenLogprobs
from lora_serve.core.request import AdapterUse, FinishReason, InferenceRequest, PoolingParams, SamplingParams
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.model.build import build_model
from lora_serve.text.grammars.matcher import GrammarConstraints
from lora_serve.text.grammars.vocabulary import Vocabularies
from lora_serve.text.tokenizer import TextModel
from tests.loading import load_adapter


@dataclass
class Answer:
    """What one request came to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    pooled: bytes | None = None
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: LoraServeError | None = None


class LocalEngine:
    """`adapters`: folders by name. Loads happen between two steps, on the calling thread."""

    def __init__(
        self, model: Path, adapters: Mapping[str, Path] | None = None, with_grammars: bool = False, **settings: Any
    ) -> None:
        self.settings = Settings(model=str(model), **settings)
        self.parts = build_model(
            self.settings.part(ModelConfig),
            self.settings.part(EngineConfig),
            self.settings.part(AdapterConfig).max_loras,
        )
        self._loading: list[AdapterRef] = []
        self._compiled: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
        spec = self.parts.spec
        vocabularies = Vocabularies(lambda: TextModel.load(str(model)), spec.vocab_size, spec.eos_token_ids)
        self.constraints = (
            GrammarConstraints(vocabularies, GrammarConfig(), self._compiled.put) if with_grammars else None
        )
        self.engine = build_engine(
            self.parts.runner,
            self.parts.spec,
            self.parts.num_blocks,
            self.settings.part(EngineConfig),
            self.settings.part(AdapterConfig),
            self._loading.append,
            memory=self.parts.memory,
            constraints=self.constraints,
            graphs=self.parts.graphs,
            launcher=self.parts.launcher,
        )
        self._folders = {name: self._as_registered(folder) for name, folder in (adapters or {}).items()}
        self.refs = {name: self._ref(name, folder) for name, folder in self._folders.items()}
        self.max_adapters_in_batch = 0
        self._num_requests = 0

    def request(
        self, prompt: list[int], adapter: str | Mapping[str, float] | None = None, **sampling: Any
    ) -> InferenceRequest:
        """A greedy request unless `sampling` says otherwise. `adapter`: a name, or names and their scales."""
        self._num_requests += 1
        scales = {adapter: 1.0} if isinstance(adapter, str) else adapter or {}
        starts = {name: self.refs[name].start_in(prompt) for name in scales}
        return InferenceRequest(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            adapters=tuple(
                AdapterUse(self.refs[name], scale, start)
                for name, scale in scales.items()
                if (start := starts[name]) is not None
            ),
            arrival_time=time.monotonic(),
        )

    def pooling_request(
        self, prompt: list[int], adapter: str | Mapping[str, float] | None = None, types: tuple[int, ...] = ()
    ) -> InferenceRequest:
        """One that is answered by a vector. `types`: of the tokens, for a pair of texts."""
        return replace(self.request(prompt, adapter), pooling=PoolingParams(types))

    def run(self, requests: list[InferenceRequest]) -> list[Answer]:
        """All requests at once, to their ends."""
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            self._take(answers, self.engine.scheduler.add(request))
        while any(answer.reason is None and answer.error is None for answer in answers.values()):
            did_run, events = self.engine.step()
            self._take(answers, events)
            if not (did_run or events or self._loading):
                assert self.engine.scheduler.waiting, "the engine stands still with work to do"
                self._take(answers, self.engine.grammar_compiled(self._compiled.get(timeout=60)))
            while not self._compiled.empty():
                self._take(answers, self.engine.grammar_compiled(self._compiled.get()))
            self._load(answers)
        recent = self.engine.stats().recent_batches
        self.max_adapters_in_batch = max(batch.num_adapters for batch in recent)
        return list(answers.values())

    def load(self) -> None:
        """Makes the loads that are asked for; for callers that make the steps themselves."""
        self._load({})

    def close(self) -> None:
        if self.constraints is not None:
            self.constraints.close()

    def _load(self, answers: dict[str, Answer]) -> None:
        while self._loading:
            ref = self._loading.pop(0)
            try:
                host = self.parts.fold(load_adapter(self._folders[ref.name], ref, self.parts.spec))
                message = LoadFinished(ref.digest, host, None, 0.0)
            except LoraServeError as error:
                message = LoadFinished(ref.digest, None, error, 0.0)
            self._take(answers, self.engine.load_finished(message))

    def _take(self, answers: dict[str, Answer], events: list[Any]) -> None:
        for event in events:
            answer = answers[event.request_id]
            match event:
                case PromptEvent():
                    answer.prompt_logprobs = event.prompt_logprobs
                    answer.num_cached_tokens = event.num_cached_tokens
                case TokenEvent():
                    answer.token_ids.append(event.token_id)
                    answer.logprobs.append(event.logprobs)
                case PooledEvent():
                    answer.pooled = event.values
                case FinishEvent():
                    answer.reason, answer.stop_token_id = event.reason, event.stop_token_id
                case ErrorEvent():
                    answer.error = event.error

    def _as_registered(self, folder: Path) -> Path:
        """The folder itself, or a plain LoRA made of it, as the registry would store it."""
        artifact = read_artifact(folder, self.parts.spec)
        if not artifact.config.init:
            return folder
        copy = folder.with_name(f"{folder.name}_as_registered")
        copy.mkdir(exist_ok=True)
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            shutil.copyfile(folder / file, copy / file)
        convert_to_plain_lora(copy, artifact, self.parts.undo)
        return copy

    def _ref(self, name: str, folder: Path) -> AdapterRef:
        spec, artifact = self.parts.spec, read_artifact(folder, self.parts.spec)
        host = self.parts.fold(read_weights(folder, artifact))
        return AdapterRef("default", name, 1, artifact.digest, host.rank, host.num_bytes, traits_of(artifact, spec))


def refusal(engine: LocalEngine, folder: Path) -> str | None:
    """Why the engine's model refuses the adapter in a folder; None if it takes it."""
    try:
        artifact = read_artifact(folder, engine.parts.spec)
        saved = read_weights(folder, artifact)
        if artifact.config.init:
            engine.parts.undo(saved, artifact.config.init, lambda: None)
    except InvalidAdapterError as error:
        return str(error)
    return None
