"""An engine with the parts that must be in one process with it: model, loader threads, the adapters' validator."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lora_serve.adapters.stores.blobs import Blobs
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.process import without_collections
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.engine.loader import Loader, Pace
from lora_serve.engine.loop import Mail
from lora_serve.model.adapter_reader import AdapterReader
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.validation import LastFolded, LocalValidator
from lora_serve.model.system.threads import use_one_core
from lora_serve.text.grammars.matcher import GrammarConstraints
from lora_serve.text.grammars.vocabulary import Vocabularies
from lora_serve.text.tokenizer import TextModel


class LocalEngine:
    """Built in one go; `close` after the engine's thread has ended."""

    def __init__(
        self,
        parts: ModelParts,
        engine: EngineConfig,
        adapters: AdapterConfig,
        blobs: Blobs,
        text: Callable[[], TextModel],
    ) -> None:
        """`text`: gives the model's tokenizer; called on a thread, by a model that generates."""
        self.spec: ModelSpec = parts.spec
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._parts = parts
        self._configs = engine, adapters
        self._is_warm = False
        last_folded = LastFolded()
        self.validator = LocalValidator(parts.fold, parts.undo, last_folded)
        source = AdapterReader(blobs, parts, last_folded.take)
        self._loader: Loader[HostAdapter] = Loader(
            source.load,
            self.mailbox.put,
            adapters.adapter_load_threads,
            keep=source.keep,
            pace=Pace(lambda: self.engine.is_busy and self._is_warm),  # loads need not give way to the warm-up's steps
            on_start=use_one_core,
            timeout=adapters.adapter_load_timeout,
        )
        self._constraints = None if parts.spec.pooling is not None else self._grammars(engine, text)
        self.engine: Engine = self.rebuild()

    def rebuild(self) -> Engine:
        """Replaces the engine by one with empty tables."""
        parts = self._parts
        self.engine = build_engine(
            parts.runner,
            parts.spec,
            parts.num_blocks,
            *self._configs,
            self._loader.submit,
            memory=parts.memory,
            constraints=self._constraints,
            graphs=parts.graphs,
            launcher=parts.launcher,
        )
        return self.engine

    def warm_up_done(self) -> None:
        """The warm-up is over: loads give way to steps from now on."""
        self._is_warm = True

    def close(self) -> None:
        """Wait for the loads and the grammars that have begun."""
        self._loader.close()
        if self._constraints is not None:
            self._constraints.close()

    def _grammars(self, config: GrammarConfig, text: Callable[[], TextModel]) -> GrammarConstraints:
        """Compiles grammars over the model's own tokenizer, which it begins to read while the server warms up."""
        spec = self.spec
        vocabularies = Vocabularies(text, spec.vocab_size, spec.eos_token_ids)
        constraints = GrammarConstraints(vocabularies, config, self.mailbox.put, use_one_core)
        constraints.prepare()
        return constraints


def build_parts(model: ModelConfig, engine: EngineConfig, adapters: AdapterConfig) -> ModelParts:
    """Builds the model on a thread whose OpenMP team ends with it (`model/system`). Raises ModelError, ConfigError."""
    with without_collections(), ThreadPoolExecutor(1, "build") as thread:
        return thread.submit(build_model, model, engine, adapters.max_loras, adapters.adapter_memory).result()
