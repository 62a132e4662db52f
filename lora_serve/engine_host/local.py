"""An engine with the parts that must be in one process with it: model, loader threads, the adapters' validator."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.checkpoint.content import DUMMY_DIGEST
from lora_serve.adapters.checkpoint.saved import dummy_adapter
from lora_serve.adapters.checkpoint.weights import parse_checked
from lora_serve.adapters.loading.blobs import Blobs, fetch_timed
from lora_serve.adapters.loading.loader import Loaded, Loader, Pace
from lora_serve.adapters.regular_file import ChangedFileError, NotRegularError
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import LoadTimes
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.process import without_collections
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.engine.loop import Mail
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.lora import host_adapter
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.validation import LastFolded, LocalValidator
from lora_serve.model.system.threads import use_one_core
from lora_serve.text.grammars.matcher import GrammarConstraints
from lora_serve.text.grammars.vocabulary import Vocabularies
from lora_serve.text.tokenizer import TextModel

_log = logging.getLogger(__name__)


class AdapterReader:
    """Reads adapters: the prepared file on this machine's disk if there is a sound one, else the adapter's own files.

    Every byte is checked against a digest after it was read. Used by several threads at once.
    """

    def __init__(
        self,
        blobs: Blobs,
        parts: ModelParts,
        last_folded: Callable[[AdapterRef], HostAdapter | None] = lambda adapter: None,
    ) -> None:
        """Prepared files lie in the blobs' folders on this machine. `last_folded`: gives an adapter that was read,
        checked and folded just now.
        """
        self._last_folded = last_folded
        self._blobs = blobs
        self._parts = parts
        self._base = host_adapter.PreparedBase.of(parts.spec)
        self._pin = parts.spec.device.startswith("cuda")

    def load(self, adapter: AdapterRef) -> Loaded[HostAdapter]:
        """Reads one adapter. Raises AdapterUnavailableError, InvalidAdapterError, OSError."""
        if adapter.digest == DUMMY_DIGEST:
            return Loaded(self._parts.fold(dummy_adapter(self._parts.spec)), LoadTimes("none"))
        if (value := self._last_folded(adapter)) is not None:
            return Loaded(value, LoadTimes("none"))
        return self._prepared(adapter) or self._ordinary(adapter)

    def keep(self, adapter: AdapterRef, value: HostAdapter) -> None:
        """Writes the prepared file for the next load, unless it is there or the adapter is of a kind that has none."""
        if adapter.digest == DUMMY_DIGEST or not value.is_plain:
            return
        name = host_adapter.file_name(adapter, self._base)
        try:
            with self._blobs.near(adapter.digest) as blob:
                if not (blob / name).exists():
                    self._blobs.keep_beside(adapter.digest, name, host_adapter.pack(value, self._base))
        except AdapterUnavailableError:  # the adapter was deleted meanwhile
            return
        except (OSError, MemoryError) as error:
            _log.info("%s is not prepared for its next load: %r", adapter.label, error)

    def _prepared(self, adapter: AdapterRef) -> Loaded[HostAdapter] | None:
        try:
            with self._blobs.near(adapter.digest) as blob:
                return self._read_prepared(blob / host_adapter.file_name(adapter, self._base), adapter)
        except (AdapterUnavailableError, OSError):  # `_ordinary` says in words what is wrong
            return None

    def _read_prepared(self, path: Path, adapter: AdapterRef) -> Loaded[HostAdapter] | None:
        start = time.perf_counter()
        if adapter.traits.base not in ("", self._base.fingerprint) or not os.path.lexists(path):
            return None
        try:
            file = host_adapter.read(path, pin=self._pin)
            fetched = time.perf_counter()
            host_adapter.verify(file)
            verified = time.perf_counter()
            value = host_adapter.unpack(file, adapter, self._base)
        except (host_adapter.NotPreparedError, NotRegularError, ChangedFileError) as error:
            _log.warning("the prepared file of %s is removed: %s", adapter.label, error)
            with suppress(OSError):
                path.unlink()
            return None
        return Loaded(value, LoadTimes("disk", fetched - start, verified - fetched, time.perf_counter() - verified))

    def _ordinary(self, adapter: AdapterRef) -> Loaded[HostAdapter]:
        spec = self._parts.spec
        saved, times = fetch_timed(self._blobs, adapter.digest, lambda content: parse_checked(content, adapter, spec))
        start = time.perf_counter()
        value = self._parts.fold(saved)
        return Loaded(value, dataclasses.replace(times, fold=time.perf_counter() - start))


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
