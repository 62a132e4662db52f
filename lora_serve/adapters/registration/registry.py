"""Registers and removes adapters. Registrations run side by side on a few threads, the short edits beside them.

Order of a registration: private copy, validation, a hold of its blob, store (flushed), smoke test, catalog commit. So
whoever got an answer finds the adapter again after a crash, and whoever got none finds nothing after `sweep`.

Until the hold a registration touches nothing but its private folder. What is shared has one owner each: the catalog
commits one edit after another, and numbers of versions, limits and whether an id may change are decided in that edit;
the store may be given the same content twice at once, and its bytes go only when nobody holds them; the engine tries
one adapter after another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.allowance import check_allowance, owner_of
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import check_same_content
from lora_serve.adapters.catalog.entry import Canary, CatalogEntry, VersionEntry
from lora_serve.adapters.catalog.tenant_removal import TenantRemoval
from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.registration.blob_collection import BlobCollector
from lora_serve.adapters.registration.smoke_test import check_smoke_test, smoke_test_prompt
from lora_serve.adapters.registration.summary import origin_of, summary_of, traits_of
from lora_serve.adapters.registration.sweeping import sweep_store
from lora_serve.adapters.registration.validation_budget import ValidationBudget
from lora_serve.adapters.registration.verification import AdapterVerifier, StagedAdapter
from lora_serve.adapters.sources.folder_copy import copy_files, find_folder, private_folder
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.files import new_folder
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
)
from lora_serve.core.messages import AdapterSize
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.tenant import NO_LIMITS, Quota

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
        verifier: AdapterVerifier,
        base_tokens: BaseTokens | None = None,
        quota_of: Callable[[str], Quota] = lambda tenant: NO_LIMITS,
    ) -> None:
        """`verifier`: shows what an adapter needs and does before it is taken in. `base_tokens`: None: adapters'
        tokenizers are not looked at. `quota_of`: a tenant's, as it is now.
        """
        self._base_tokens = base_tokens
        self._quota_of = quota_of
        self._config = config
        self._verifier = verifier
        self._spec = spec
        self._catalog = catalog
        self._store = store
        self._tmp = config.store / "tmp"
        self._writer = catalog.keep_blob_records(store)
        self._blobs = BlobCollector(catalog, store)

    def new_folder(self) -> Path:
        """A private folder for files to come; `register_staged` removes it, or the next sweep. Raises OSError."""
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
        activate: bool = True,
    ) -> Registration:
        """Register a folder of this machine. `trusted`: named by the operator's own flag, so not held to the roots.
        `activate`: the bare id means it from now on.

        Raises InvalidRequestError, ConflictError, InvalidAdapterError, PayloadTooLargeError, AdapterUnavailableError.
        """
        self.check_new(name, tenant, metadata)
        roots = None if trusted else self._config.roots
        found = Path(folder) if roots is None else find_folder(folder, roots)
        with private_folder(self.new_folder) as copy:
            copy_files(found, copy, self._config.max_upload_bytes, roots)
            return self._register(name, copy, f"folder {found.name}", tenant, pin, metadata, allow_noop, activate)

    def register_staged(
        self,
        name: str,
        staged_folder: Path,
        source: str = "upload",
        tenant: str | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
        allow_noop: bool = False,
        activate: bool = True,
        may_change: bool = True,
        digest: str | None = None,
    ) -> Registration:
        """Register what was received or fetched into a folder of `new_folder`, which is gone afterwards.

        `source`: what the card says. `may_change`: False: an id that is known gets no content that is new to it; then
        raises OtherContentError, else as above. `digest`: that the version must have, or nothing is stored.
        """
        assert staged_folder.parent == self._tmp, "files are staged in a folder of new_folder()"
        with private_folder(lambda: staged_folder) as folder:
            self.check_new(name, tenant, metadata)
            return self._register(name, folder, source, tenant, pin, metadata, allow_noop, activate, may_change, digest)

    def check_new(self, name: str, tenant: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Refuse early, before anything is fetched.

        Raises InvalidRequestError, ConflictError, QuotaExceededError.
        """
        self._catalog.check_new(name, tenant, metadata)
        self._check_allowance(name, tenant)

    def delete(self, name: str, version: int | None = None) -> tuple[str, ...]:
        """Unregister a version, or all; durable on return. The digests that nothing names any more: once no row
        uses them, `collect` frees their bytes. Raises AdapterNotFoundError.
        """
        return self._catalog.remove(name, version)

    def drain(self, digest: str) -> None:
        """Keep a blob that nothing names any more, though another replica may want to delete it, until `collect`."""
        self._catalog.leases.drain(digest)

    def collect(self, digest: str, holder: str | None = None) -> bool:
        """End a hold (None: that of `drain`); see `BlobCollector.collect`."""
        return self._blobs.collect(digest, holder or self._catalog.leases.drain_holder)

    @property
    def has_pending(self) -> bool:
        """Whether `retry_pending` has anything to do."""
        return self._blobs.has_pending or self._writer.has_pending

    def retry_pending(self) -> None:
        """Try again what could not be done: a disk, or a Redis, that was away may be back."""
        self._writer.retry_pending(self._catalog.ledger.state)
        self._blobs.retry_pending()

    def set_pinned(self, name: str, pinned: bool, max_bytes: int | None = None) -> CatalogEntry:
        """`max_bytes`: that its tenant may have pinned. Raises AdapterNotFoundError, ForbiddenError."""
        return self._catalog.set_pinned(name, pinned, max_bytes)

    def set_route(self, name: str, version: int | None, canary: Canary | None) -> CatalogEntry:
        """Raises AdapterNotFoundError, InvalidRequestError."""
        return self._catalog.set_route(name, version, canary)

    def set_sharing(self, name: str, shared_with: Collection[str]) -> CatalogEntry:
        """Raises AdapterNotFoundError, InvalidRequestError."""
        return self._catalog.set_sharing(name, shared_with)

    def delete_tenant(self, tenant: str) -> TenantRemoval:
        """Unregister all that a tenant has; as `delete`."""
        return self._catalog.remove_tenant(tenant)

    def roll_back(self, name: str) -> CatalogEntry:
        """Raises AdapterNotFoundError, ConflictError."""
        return self._catalog.roll_back(name)

    def set_alias(self, alias: str, target: str) -> None:
        """Raises InvalidRequestError, AdapterNotFoundError, ConflictError."""
        self._catalog.set_alias(alias, target)

    def remove_alias(self, alias: str) -> None:
        """Raises AdapterNotFoundError."""
        self._catalog.remove_alias(alias)

    def set_host_bytes(self, host_bytes: int) -> None:
        """The host tier's new budget: what one adapter may need from now on."""
        self._config = replace(self._config, host_bytes=host_bytes)

    def sweep(self) -> None:
        """Once at start: remove what a crash left over; set aside broken blobs, and those that the catalog cannot know.

        Of a store that replicas share only this server's own leftovers go, and those of replicas long gone.
        """
        sweep_store(self._catalog, self._store, self._config, self.collect)

    def _register(
        self,
        name: str,
        folder: Path,
        source: str,
        tenant: str | None,
        pin: bool,
        metadata: Mapping[str, Any] | None,
        allow_noop: bool,
        activate: bool,
        may_change: bool = True,
        wanted: str | None = None,
    ) -> Registration:
        budget = ValidationBudget(self._config.registration_seconds)
        sent = read_artifact(folder, self._spec, self._config.max_lora_rank, base_tokens=self._base_tokens)
        budget.check()
        only = None if may_change else sent.digest
        check_same_content(self._catalog.snapshot.entries.get(name), only)
        known = self._converted_before(name, sent)
        artifact, origin = (sent, {}) if known else self._plain(folder, sent, budget)
        digest = known.digest if known else artifact.digest
        if wanted not in (None, digest):
            raise InvalidRequestError(f"The adapter's content is {digest}, not what `digest` says.", param="digest")
        with self._blobs.held(digest) as holder:
            if known and not self._store.has(digest):  # it was deleted before the hold
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            version = known or self._verified(name, folder, source, tenant, artifact, origin, allow_noop, budget)
            quota = self._quota_of(owner_of(self._catalog.snapshot, name, tenant))
            entry, added, created = self._catalog.add(
                name, version, tenant, pin, metadata, activate, holder, quota, only
            )
        return Registration(entry, entry.ref(added), created)

    def _verified(
        self,
        name: str,
        folder: Path,
        source: str,
        tenant: str | None,
        artifact: Artifact,
        origin: Mapping[str, Any],
        allow_noop: bool,
        budget: ValidationBudget,
    ) -> VersionEntry:
        """Check it, store it, and try it on the engine."""
        size = self._check(folder, artifact, allow_noop, budget)
        self._check_allowance(name, tenant, artifact.digest, size.num_bytes)
        traits = traits_of(artifact, self._spec)
        ref = AdapterRef(tenant or "", name, 0, artifact.digest, size.rank, size.num_bytes, traits)
        self._store.put(artifact.digest, folder)
        tested = self._verifier.smoke_test(
            ref, smoke_test_prompt(artifact.config, self._spec, artifact.bound.vocab_size)
        )
        check_smoke_test(tested, allow_noop)
        summary = summary_of(artifact, traits, tested, (self._spec.name, self._config.base_name))
        return VersionEntry(0, ref.digest, ref.rank, ref.num_bytes, {**summary, **origin}, source, time.time())

    def _check_allowance(self, name: str, tenant: str | None, digest: str = "", num_bytes: int = 0) -> None:
        snapshot = self._catalog.snapshot
        owner = owner_of(snapshot, name, tenant)
        check_allowance(snapshot, owner, name, digest, num_bytes, self._quota_of(owner))

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

    def _plain(self, folder: Path, sent: Artifact, budget: ValidationBudget) -> tuple[Artifact, dict[str, Any]]:
        """The folder as it will be stored, and what its card says of that."""
        if not sent.config.init:
            return sent, {}
        started = time.perf_counter()
        self._verifier.convert(self._staged(folder, sent, budget))
        plain = read_artifact(folder, self._spec, self._config.max_lora_rank)
        _log.info(
            "%s undone for %d modules in %.1f s",
            sent.config.init,
            len(sent.bound.linears),
            time.perf_counter() - started,
        )
        return plain, {"converted_from": origin_of(sent, self._spec)}

    def _check(self, folder: Path, artifact: Artifact, allow_noop: bool, budget: ValidationBudget) -> AdapterSize:
        """As it will be served."""
        size = self._verifier.validate(self._staged(folder, artifact, budget), allow_noop=allow_noop)
        if size.num_bytes > self._config.host_bytes:
            raise InvalidAdapterError(
                [f"it needs {size.num_bytes} bytes; --adapter-host-memory allows {self._config.host_bytes}"]
            )
        return size

    def _staged(self, folder: Path, artifact: Artifact, budget: ValidationBudget) -> StagedAdapter:
        return StagedAdapter(folder, artifact, self._spec, self._config.max_lora_rank, budget)
