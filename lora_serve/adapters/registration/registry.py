"""Registers adapters and frees the blobs of removed ones. Registrations run side by side on a few threads.

Order of a registration: private copy, validation, a lease on its blob, store (flushed), smoke test, catalog commit. So
an adapter whose registration was answered is found again after a crash, and `sweep` removes what any other left.

Before the lease a registration touches nothing but its private folder. Shared state has one owner each: the catalog
commits one edit after another and decides version numbers, limits and changes of an id inside that edit; the store may
be given the same content twice at once, and its bytes go only when nobody leases them; the engine runs one smoke test
after another.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.blob_records import digests_of
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import check_same_content
from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry, vouched
from lora_serve.adapters.catalog.snapshot import check_allowance, owner_of
from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.checkpoint.chat_template import BaseTemplates
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.registration.blob_collector import BlobCollector, sweep_store
from lora_serve.adapters.registration.summary import origin_of, summary_of, traits_of
from lora_serve.adapters.registration.verification import (
    AdapterVerifier,
    StagedAdapter,
    ValidationBudget,
    check_smoke_test,
    smoke_test_prompt,
)
from lora_serve.adapters.sources.folder import copy_files, find_folder
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.files import new_folder, remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    StoreUnwritableError,
)
from lora_serve.core.messages import AdapterSize
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.tenant import NO_LIMITS, Quota

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of a registration."""

    entry: CatalogEntry
    ref: AdapterRef
    created: bool  # False: this id had this very content already


def _nothing() -> None: ...


class Registry:
    """Every method may be called from any thread."""

    def __init__(
        self,
        config: AdapterConfig,
        spec: ModelSpec,
        catalog: Catalog,
        store: AdapterStore,
        verifier: AdapterVerifier,
        base_tokens: BaseTokens | None = None,
        quota_of: Callable[[str], Quota] = lambda tenant: NO_LIMITS,
        base_templates: BaseTemplates | None = None,
    ) -> None:
        """`base_tokens` None: adapters' tokenizers are not read, `base_templates` None: nor are their chat templates.
        `quota_of`: a tenant's current quota.
        """
        self._base_templates = base_templates
        self._base_tokens = base_tokens
        self._quota_of = quota_of
        self._config = config
        self._verifier = verifier
        self._spec = spec
        self._catalog = catalog
        self._store = store
        self._tmp = config.store / "tmp"
        self._record_writer = catalog.keep_blob_records(store)
        self._blobs = BlobCollector(catalog, store)
        self._sweeping = sweep_store(catalog, store, config, self.collect)

    def new_folder(self) -> Path:
        """A private folder for incoming files; `register_staged` removes it, or the next sweep. Raises OSError."""
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
        """Register a folder of this machine for the operator. `trusted`: named by a flag, so the roots do not apply.
        `activate`: the bare id means this version from now on.

        Raises InvalidRequestError, ConflictError, InvalidAdapterError, PayloadTooLargeError, AdapterUnavailableError.
        """
        self.check_new(name, tenant, metadata)
        roots = None if trusted else self._config.adapter_root
        found = Path(folder) if roots is None else find_folder(folder, roots)
        with _private_folder(self.new_folder) as copy:
            copy_files(found, copy, self._config.max_upload_size, roots)
            source = f"folder {folder}"
            return self._register(name, copy, source, tenant, pin, metadata, allow_noop, activate, by_admin=True)

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
        by_admin: bool = False,
        on_probe: Callable[[], None] = _nothing,
    ) -> Registration:
        """Register files that were received or fetched into a folder of `new_folder`, which is removed afterwards.

        `source`: shown on the card. `may_change` False: a known id gets no new content; raises OtherContentError
        instead. `digest`: the version must have it, or nothing is stored. `by_admin`: the operator's own key registers
        it. `on_probe`: called once the files are found right. Raises as `register_folder` does.
        """
        assert staged_folder.parent == self._tmp, "files are staged in a folder of new_folder()"
        with _private_folder(lambda: staged_folder) as folder:
            self.check_new(name, tenant, metadata)
            return self._register(
                name, folder, source, tenant, pin, metadata, allow_noop, activate, may_change, digest, by_admin,
                on_probe,
            )  # fmt: skip

    def check_new(self, name: str, tenant: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Refuse early, before anything is fetched.

        Raises InvalidRequestError, ConflictError, QuotaExceededError.
        """
        self._catalog.check_new(name, tenant, metadata)
        self._check_allowance(name, tenant)

    def delete(self, name: str, version: int | None = None) -> tuple[str, ...]:
        """Unregister a version, or all, durably. Returns the digests that no version names any more: `collect` frees
        their bytes once no row uses them. Raises AdapterNotFoundError.
        """
        held = self._catalog.snapshot.held & {name}
        return self._catalog.remove(name, version, digests_of(self._store, held, self._store.digests()) if held else ())

    def collect(self, digest: str, holder: str | None = None) -> bool:
        """See `BlobCollector.collect`. `holder` None: the lease of running rows ends."""
        return self._blobs.collect(digest, holder or self._catalog.leases.drain_holder)

    @property
    def has_pending(self) -> bool:
        """True if `retry_pending` has anything to do."""
        return self._blobs.has_pending or self._record_writer.has_pending

    def retry_pending(self) -> None:
        """Retry deletions and blob records that failed: the disk, or Redis, may be back."""
        self._record_writer.retry_pending(self._catalog.ledger)
        self._blobs.retry_pending()

    def set_host_bytes(self, host_bytes: int) -> None:
        """Set the host tier's new budget, the most that one adapter may need from now on."""
        self._config = replace(self._config, adapter_host_memory=host_bytes)

    @property
    def is_sweeping(self) -> bool:
        """True after the first piece of `sweep`, until the last."""
        return inspect.getgeneratorstate(self._sweeping) in (inspect.GEN_SUSPENDED, inspect.GEN_RUNNING)

    def sweep(self, seconds: float = math.inf) -> bool:
        """Remove leftovers of a crash, set broken blobs and blobs unknown to the catalog aside, once in a life.

        Returns after about `seconds`, False once all is done; to be called again, by one thread at a time, until then.
        The first call comes before any other; later ones may run beside registrations. In a shared store only the
        leftovers of this server, and of replicas long gone, are removed.
        """
        end = time.monotonic() + seconds
        return any(time.monotonic() >= end for _ in self._sweeping)

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
        by_admin: bool = False,
        on_probe: Callable[[], None] = _nothing,
    ) -> Registration:
        budget = ValidationBudget(self._config.registration_seconds)
        sent = self._read(folder)
        budget.check()
        only = None if may_change else sent.digest
        check_same_content(self._catalog.snapshot.entries.get(name), only)
        known = self._converted_before(name, sent)
        artifact, origin = (sent, {}) if known else self._converted(folder, sent, budget)
        digest = known.digest if known else artifact.digest
        if wanted not in (None, digest):
            raise InvalidRequestError(f"The adapter's content is {digest}, not what `digest` says.", param="digest")
        with self._blobs.leased(digest) as holder:
            if known and not self._store.has(digest):  # it was deleted before the lease began
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            version = known or self._verified(
                name, folder, source, tenant, artifact, origin, allow_noop, budget, on_probe
            )
            version = vouched(version) if by_admin else version
            quota = self._quota_of(owner_of(self._catalog.snapshot, name, tenant))
            entry, added, created = self._catalog.add(
                name, version, tenant, pin, metadata, activate, holder, quota, only
            )
        return Registration(entry, entry.ref(added), created)

    def _read(self, folder: Path) -> Artifact:
        tokens, templates = self._base_tokens, self._base_templates
        return read_artifact(
            folder, self._spec, self._config.max_lora_rank, base_tokens=tokens, base_templates=templates
        )

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
        on_probe: Callable[[], None],
    ) -> VersionEntry:
        """Validates the adapter, puts it into the store and runs the smoke test."""
        size = self._validated(folder, artifact, allow_noop, budget)
        self._check_allowance(name, tenant, artifact.digest, size.num_bytes)
        traits = traits_of(artifact, self._spec)
        ref = AdapterRef(tenant or "", name, 0, artifact.digest, size.rank, size.num_bytes, traits)
        self._store.put(artifact.digest, folder)
        on_probe()
        prompt = smoke_test_prompt(artifact.config, self._spec, artifact.bound.vocab_size)
        result = self._verifier.smoke_test(ref, prompt)
        check_smoke_test(result, allow_noop)
        summary = summary_of(artifact, traits, result, (self._spec.name, self._config.base_name))
        return VersionEntry(0, ref.digest, ref.rank, ref.num_bytes, {**summary, **origin}, source, time.time())

    def _check_allowance(self, name: str, tenant: str | None, digest: str = "", num_bytes: int = 0) -> None:
        snapshot = self._catalog.snapshot
        owner = owner_of(snapshot, name, tenant)
        check_allowance(snapshot, owner, name, digest, num_bytes, self._quota_of(owner))

    def _converted_before(self, name: str, sent: Artifact) -> VersionEntry | None:
        """The version of this id that was converted from the very same files, if its bytes are still there."""
        entry = self._catalog.snapshot.entries.get(name)
        if entry is None or not sent.config.init:
            return None
        origin = {"digest": sent.digest, "base": self._spec.name}
        for version in entry.versions:
            if origin.items() <= version.summary.get("converted_from", {}).items() and self._store.has(version.digest):
                return version
        return None

    def _converted(self, folder: Path, sent: Artifact, budget: ValidationBudget) -> tuple[Artifact, dict[str, Any]]:
        """The folder as it will be stored, and what its card says about the conversion."""
        if not sent.config.init:
            return sent, {}
        started = time.perf_counter()
        self._verifier.convert(self._staged(folder, sent, budget))
        plain = read_artifact(folder, self._spec, self._config.max_lora_rank)
        num_modules, seconds = len(sent.bound.linears), time.perf_counter() - started
        _log.info("%s undone for %d modules in %.1f s", sent.config.init, num_modules, seconds)
        plain = replace(plain, template=sent.template, ends=sent.ends)
        return plain, {"converted_from": origin_of(sent, self._spec)}

    def _validated(self, folder: Path, artifact: Artifact, allow_noop: bool, budget: ValidationBudget) -> AdapterSize:
        size = self._verifier.validate(self._staged(folder, artifact, budget), allow_noop=allow_noop)
        if size.num_bytes > self._config.adapter_host_memory:
            raise InvalidAdapterError(
                [f"it needs {size.num_bytes} bytes; --adapter-host-memory allows {self._config.adapter_host_memory}"]
            )
        return size

    def _staged(self, folder: Path, artifact: Artifact, budget: ValidationBudget) -> StagedAdapter:
        return StagedAdapter(folder, artifact, self._spec, self._config.max_lora_rank, budget)


@contextmanager
def _private_folder(make: Callable[[], Path]) -> Iterator[Path]:
    """The folder that `make` returns, removed afterwards. Raises StoreUnwritableError in place of OSError."""
    folder = None
    try:
        folder = make()
        yield folder
    except OSError as error:
        _log.warning("registration failed: %r", error)
        raise StoreUnwritableError(f"The store cannot be written at present: {words_of(error)}.") from None
    finally:
        if folder is not None:
            remove_folder(folder)
