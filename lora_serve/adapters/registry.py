"""Registers and removes adapters. Every method runs on ONE worker thread, the catalog's writer.

Order of a registration: private copy, checks, store (flushed), catalog commit. So whoever got an answer finds the
adapter again after a crash, and whoever got none finds nothing after `sweep`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.admission import copy_files, find_folder
from lora_serve.adapters.catalog import Catalog
from lora_serve.adapters.catalog_entry import CatalogEntry, VersionEntry
from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.checkpoint.plain_lora import make_plain
from lora_serve.adapters.checkpoint.values import check_values
from lora_serve.adapters.checkpoint.weights import read_weights
from lora_serve.adapters.probe import check_probe, probe_prompt
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import new_folder, remove_folder
from lora_serve.adapters.summary import summary_of, traits_of
from lora_serve.adapters.trial import Trial
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import ProbeResult
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError, LoraServeError
from lora_serve.core.model_spec import ModelSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """What came of a registration."""

    entry: CatalogEntry
    ref: AdapterRef
    created: bool  # False: this id had this very content already


class Registry:
    """The only writer of catalog and store."""

    def __init__(
        self,
        config: AdapterConfig,
        spec: ModelSpec,
        catalog: Catalog,
        store: AdapterStore,
        trial: Trial,
        base_tokens: BaseTokens | None = None,
    ) -> None:
        """`trial`: how an adapter shows what it needs and does, before it is taken in. `base_tokens`: None: adapters'
        tokenizers are not looked at.
        """
        self._base_tokens = base_tokens
        self._config = config
        self._trial = trial
        self._spec = spec
        self._catalog = catalog
        self._store = store
        self._tmp = config.store / "tmp"

    def new_folder(self) -> Path:
        """A private folder to receive an upload; `register_upload` removes it, or the next sweep. Raises OSError."""
        return new_folder(self._tmp)

    def register_folder(
        self,
        name: str,
        folder: str | Path,
        tenant: str | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
        allow_noop: bool = False,
        trusted: bool = False,
    ) -> Registration:
        """Register a folder of this machine. `trusted`: named by the operator's own flag, so not held to the roots.

        Raises InvalidRequestError, ConflictError, InvalidAdapterError, PayloadTooLargeError, AdapterUnavailableError.
        """
        self._catalog.check_new(name, tenant, metadata)
        roots = None if trusted else self._config.roots
        found = Path(folder) if roots is None else find_folder(folder, roots)
        with self._private_folder() as copy:
            copy_files(found, copy, self._config.max_upload_bytes, roots)
            return self._register(name, copy, f"folder {found.name}", tenant, pin, metadata, allow_noop)

    def register_upload(
        self,
        name: str,
        staged_folder: Path,
        tenant: str | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
        allow_noop: bool = False,
    ) -> Registration:
        """Register what was received into a folder of `new_folder`, which is gone afterwards. Raises as above."""
        assert staged_folder.parent == self._tmp, "an upload is staged in a folder of new_folder()"
        with self._private_folder(staged_folder) as folder:
            self._catalog.check_new(name, tenant, metadata)
            return self._register(name, folder, "upload", tenant, pin, metadata, allow_noop)

    def delete(self, name: str, version: int | None = None) -> tuple[str, ...]:
        """Unregister a version, or all; durable on return. The digests that nothing names any more: once no row
        holds them, `collect` frees their bytes. Raises AdapterNotFoundError.
        """
        return self._catalog.remove(name, version)

    def collect(self, digest: str) -> bool:
        """Delete the blob unless a version names it; whether it was deleted. Raises AdapterUnavailableError."""
        if digest in self._catalog.snapshot.digests:
            return False
        self._store.delete(digest)
        self._catalog.forget_stray(digest)
        return True

    def set_pinned(self, name: str, pinned: bool) -> CatalogEntry:
        """Raises AdapterNotFoundError."""
        return self._catalog.set_pinned(name, pinned)

    def set_host_bytes(self, host_bytes: int) -> None:
        """The host tier's new budget: what one adapter may need from now on."""
        self._config = replace(self._config, host_bytes=host_bytes)

    def sweep(self) -> None:
        """Once at start: remove what a crash left over, set broken blobs aside.

        Only this server's own leftovers go: a store that replicas share may hold what others name.
        """
        DiskStore(self._config.store).sweep(self._catalog.snapshot.digests)
        for digest in self._catalog.strays():
            with suppress(AdapterUnavailableError):  # it stays a stray until the next start
                self.collect(digest)

    @contextmanager
    def _private_folder(self, folder: Path | None = None) -> Iterator[Path]:
        try:
            folder = folder or self.new_folder()
            yield folder
        except OSError as error:
            _log.warning("registration failed: %r", error)
            raise AdapterUnavailableError("The adapter store cannot be written at present.") from None
        finally:
            if folder is not None:
                remove_folder(folder)

    def _register(
        self,
        name: str,
        folder: Path,
        source: str,
        tenant: str | None,
        pin: bool,
        metadata: Mapping[str, Any] | None,
        allow_noop: bool,
    ) -> Registration:
        sent = read_artifact(folder, self._spec, self._config.max_lora_rank, base_tokens=self._base_tokens)
        known = self._converted_before(name, sent)
        if known is not None:
            entry, created = self._catalog.add(name, known, tenant, pin, metadata)
            return Registration(entry, entry.ref(), created)
        artifact, origin = self._plain(folder, sent)
        rank, num_bytes = self._check(folder, artifact, allow_noop)
        traits = traits_of(artifact, self._spec)
        ref = AdapterRef(tenant or "", name, 0, artifact.digest, rank, num_bytes, traits)
        self._keep(artifact.digest, folder)
        probe = self._probe(ref, artifact, allow_noop)
        summary = summary_of(artifact, traits, probe, (self._spec.name, self._config.base_name))
        version = VersionEntry(0, ref.digest, ref.rank, num_bytes, {**summary, **origin}, source, time.time())
        entry, created = self._catalog.add(name, version, tenant, pin, metadata)
        return Registration(entry, entry.ref(), created)

    def _converted_before(self, name: str, sent: Artifact) -> VersionEntry | None:
        """The version of this id that came of the very same files, if its bytes are still there."""
        entry = self._catalog.snapshot.entries.get(name)
        if entry is None or not sent.config.init:
            return None
        origin = {"digest": sent.digest, "base": self._spec.name}
        for version in entry.versions:
            if origin.items() <= version.summary.get("converted_from", {}).items() and self._store.has(version.digest):
                return version
        return None

    def _plain(self, folder: Path, sent: Artifact) -> tuple[Artifact, dict[str, Any]]:
        """The folder as it will be stored, and what its card says of that."""
        if not sent.config.init:
            return sent, {}
        check_values(folder, sent, allow_noop=True)  # whether it is one shows after the conversion
        started = time.perf_counter()
        plain, origin = make_plain(folder, sent, self._spec, self._trial.converted, self._config.max_lora_rank)
        _log.info(
            "%s undone for %d modules in %.1f s",
            sent.config.init,
            len(sent.bound.linears),
            time.perf_counter() - started,
        )
        return plain, {"converted_from": origin}

    def _check(self, folder: Path, artifact: Artifact, allow_noop: bool) -> tuple[int, int]:
        """Its rank as it will be served, and the host memory that it needs, bytes."""
        check_values(folder, artifact, allow_noop)
        saved = read_weights(folder, artifact, max_rank=self._config.max_lora_rank)
        num_bytes = self._trial.num_bytes(saved)
        if num_bytes > self._config.host_bytes:
            raise InvalidAdapterError(
                [f"it needs {num_bytes} bytes; --adapter-host-memory allows {self._config.host_bytes}"]
            )
        return saved.rank, num_bytes

    def _probe(self, ref: AdapterRef, artifact: Artifact, allow_noop: bool) -> ProbeResult:
        """What it changes. Raises InvalidAdapterError if that is nothing, or no number."""
        try:
            probe = self._trial.probe(ref, probe_prompt(artifact.config, self._spec, artifact.bound.vocab_size))
            check_probe(probe, allow_noop)
        except LoraServeError:
            with suppress(AdapterUnavailableError):  # it stays a stray until the next sweep
                self.collect(ref.digest)
            raise
        return probe

    def _keep(self, digest: str, folder: Path) -> None:
        if not self._store.has(digest):
            self._catalog.note_stray(digest)
        try:
            self._store.put(digest, folder)
        except LoraServeError:
            with suppress(AdapterUnavailableError):  # it stays a stray until the next sweep
                self.collect(digest)
            raise
