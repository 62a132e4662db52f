"""Registers adapters and frees the blobs of removed ones. Registrations run side by side on a few threads.

Order of a registration: private copy, validation, a lease on its blob, store (flushed), smoke test, catalog commit. So
an adapter whose registration was answered is found again after a crash, and `sweep` removes what any other left. What
only the base model can tell is asked of the caller: `register` yields calls of an AdapterVerifier.

Before the lease a registration touches nothing but its private folder. Shared state has one owner each: the catalog
commits one edit after another and decides version numbers, limits and changes of an id inside that edit; the store may
be given the same content twice at once, and its bytes go only when none leases them; the engine runs one smoke test
after another.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.blob_leases import BlobCollector, CatalogHistory
from lora_serve.adapters.catalog.blob_records import digests_of, sync_in_pieces
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry, vouched
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.checkpoint.chat_template import BaseTemplates
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.registration.verification import (
    StagedAdapter,
    Steps,
    ValidationBudget,
    check_smoke_test,
    origin_of,
    smoke_test_prompt,
    summary_of,
    traits_of,
)
from lora_serve.adapters.sources.base import RegistrationProgress, Stage, Staged
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import listed, new_folder, private_or_later, remove_folder, words_of
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    StoreUnwritableError,
)
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.core.model_spec import ModelSpec

_MAX_NAMED = 10  # digests in one line of the log
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a registration."""

    entry: CatalogEntry
    ref: AdapterRef
    created: bool  # False: this id had this very content already


class Registry:
    """Every method may be called from any thread."""

    def __init__(
        self,
        config: AdapterConfig,
        spec: ModelSpec,
        catalog: Catalog,
        store: AdapterStore,
        base_tokens: BaseTokens | None = None,
        base_templates: BaseTemplates | None = None,
    ) -> None:
        """`base_tokens` None: adapters' tokenizers are not read, `base_templates` None: nor their chat templates."""
        self._base_templates = base_templates
        self._base_tokens = base_tokens
        self._config = config
        self._spec = spec
        self._catalog = catalog
        self._store = store
        self._tmp = config.store / "tmp"
        self._record_writer = catalog.keep_blob_records(store)
        self._blobs = BlobCollector(catalog.leases, store)
        self._sweeping = sweep_store(catalog, store, config, self.collect)

    def new_folder(self) -> Path:
        """A private folder for incoming files; `private_folder` removes it, or the next sweep. Raises OSError."""
        return new_folder(self._tmp)

    def register(self, registration: Registration, staged: Staged, progress: RegistrationProgress) -> Steps[Registered]:
        """Register files that lie in a folder of `new_folder`, which is the caller's to remove (`private_folder`).

        Raises InvalidRequestError, ConflictError (OtherContentError), QuotaExceededError, InvalidAdapterError,
        AdapterUnavailableError, OSError.
        """
        assert staged.folder.parent == self._tmp, "files are staged in a folder of new_folder()"
        progress.stage = Stage.EXAMINING
        registration.check(self._catalog.snapshot)
        budget = ValidationBudget(self._config.registration_seconds)
        sent = self._read(staged.folder)
        budget.check()
        registration.check_content(self._catalog.snapshot, sent.digest)
        known = self._converted_before(registration.id, sent)
        origin: dict[str, Any] = {}
        files = StagedAdapter(staged.folder, sent, self._spec, self._config.max_lora_rank, budget)
        if known is None and sent.config.init:
            files, origin = yield from self._convert(files)
        digest = files.artifact.digest if known is None else known.digest
        if registration.digest not in (None, digest):
            raise InvalidRequestError(f"The adapter's content is {digest}, not what `digest` says.", param="digest")
        with self._blobs.leased(digest) as holder:
            if known is None:
                ref, summary = yield from self._verify(registration, files, progress)
                facts = {**summary, **origin}
                version = VersionEntry(0, digest, ref.rank, ref.num_bytes, facts, staged.source, time.time())
            elif self._store.has(digest):
                version = known
            else:  # it was deleted before the lease began
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            version = vouched(version) if registration.by_admin else version
            entry, added, created = registration.commit(self._catalog.ledger, version, holder)
        return Registered(entry, entry.ref(added), created)

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

    def _read(self, folder: Path) -> Artifact:
        tokens, templates = self._base_tokens, self._base_templates
        return read_artifact(
            folder, self._spec, self._config.max_lora_rank, base_tokens=tokens, base_templates=templates
        )

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

    def _convert(self, sent: StagedAdapter) -> Steps[tuple[StagedAdapter, dict[str, Any]]]:
        """The files as they will be stored, and what the card says about the conversion."""
        started, artifact = time.perf_counter(), sent.artifact
        yield methodcaller("convert", sent)
        plain = read_artifact(sent.folder, self._spec, self._config.max_lora_rank)
        num_modules, seconds = len(artifact.bound.linears), time.perf_counter() - started
        _log.info("%s undone for %d modules in %.1f s", artifact.config.init, num_modules, seconds)
        plain = replace(plain, template=artifact.template, ends=artifact.ends)
        return replace(sent, artifact=plain), {"converted_from": origin_of(artifact, self._spec)}

    def _verify(
        self, registration: Registration, files: StagedAdapter, progress: RegistrationProgress
    ) -> Steps[tuple[AdapterRef, dict[str, Any]]]:
        """Validates the adapter, puts it into the store and runs the smoke test; its summary is for the card."""
        artifact, allow_noop = files.artifact, registration.allow_noop
        size: AdapterSize = yield methodcaller("validate", files, allow_noop=allow_noop)
        if size.num_bytes > self._config.adapter_host_memory:
            raise InvalidAdapterError(
                [f"it needs {size.num_bytes} bytes; --adapter-host-memory allows {self._config.adapter_host_memory}"]
            )
        registration.check(self._catalog.snapshot, artifact.digest, size.num_bytes)
        self._store.put(artifact.digest, files.folder)
        progress.stage = Stage.PROBING
        traits = traits_of(artifact, self._spec)
        tenant = registration.tenant or ""
        ref = AdapterRef(tenant, registration.id, 0, artifact.digest, size.rank, size.num_bytes, traits)
        prompt = smoke_test_prompt(artifact.config, self._spec, artifact.bound.vocab_size)
        result: SmokeTestResult = yield methodcaller("smoke_test", ref, prompt)
        check_smoke_test(result, allow_noop)
        return ref, summary_of(artifact, traits, result, (self._spec.name, self._config.base_name))


@contextmanager
def private_folder(make: Callable[[], Path]) -> Iterator[Path]:
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


def sweep_store(
    catalog: Catalog, store: AdapterStore, config: AdapterConfig, collect: Callable[[str, str], bool]
) -> Generator[None, None, None]:
    """Free the unnamed blobs that the catalog let go, and keep the others aside, piece by piece.

    The first piece, what an earlier life of this server left, comes before anything else changes catalog or store. The
    others may run beside registrations: the writer of a blob has leased it, and a blob is moved while the ledger is
    held, so that none can lease it meanwhile. `collect`: ends a lease and frees its blob.
    """
    own = store.near if isinstance(store, TieredStore) else store
    assert isinstance(own, DiskStore), "blobs are swept on this machine only"
    with _unwritable_till_next_start():
        for folder in (*listed(private_or_later(config.store / "tmp")), *listed(own.tmp)):
            remove_folder(folder)
        state = catalog.ledger.state
        expired = catalog.leases.expired(state)
        digests, history = {digest for digest, _ in expired}, CatalogHistory(state, catalog.is_shared)
        if state.position.epoch:  # without one the catalog cannot tell whether anything is named
            for digest in digests:
                own.sweep_blob(digest, _may_be_named(own, state, digest), history.may_delete)
        records = _records_of(store, digests)
        for digest, holder in expired:
            if history.may_delete(digest, records.get(digest, {}), {}):
                with suppress(AdapterUnavailableError):  # the collector retries later
                    collect(digest, holder)
    with suppress(AdapterUnavailableError):  # an unreachable store is synchronised when it is back
        catalog.record_lineage()
    yield
    if not state.position.epoch:
        return
    with _unwritable_till_next_start():
        yield from _swept(own, catalog, config)
    with suppress(AdapterUnavailableError):
        yield from sync_in_pieces(own, catalog.ledger)


def _may_be_named(own: DiskStore, state: CatalogState, digest: str) -> bool:
    return digest in state.snapshot.digests or bool(digests_of(own, state.unreadable, [digest]))


def _swept(own: DiskStore, catalog: Catalog, config: AdapterConfig) -> Iterator[None]:
    for digest in own.digests():
        if digest not in catalog.snapshot.digests or not own.is_well_formed(digest):
            with catalog.ledger.locked() as state:
                if not catalog.leases.is_ours(state.lease_on(digest)):
                    history = CatalogHistory(state, catalog.is_shared)
                    own.sweep_blob(digest, _may_be_named(own, state, digest), history.may_delete)
        yield
    own.orphans.expire(config.unnamed_blob_days)
    if digests := own.orphans.digests():
        more = f" and {len(digests) - _MAX_NAMED} more" if len(digests) > _MAX_NAMED else ""
        _log.warning(
            "blobs that the catalog does not know are kept aside in %s: %d (%s); `lora-serve registry rebuild` brings "
            "back what they were",
            config.store,
            len(digests),
            ", ".join(digests[:_MAX_NAMED]) + more,
        )


@contextmanager
def _unwritable_till_next_start() -> Iterator[None]:
    try:
        yield
    except (OSError, AdapterUnavailableError) as error:
        said = words_of(error) if isinstance(error, OSError) else error
        _log.warning("what an earlier life left over stays until the next start: %s", said)


def _records_of(store: AdapterStore, digests: Collection[str]) -> dict[str, dict[str, str]]:
    try:
        return store.records(digests) if digests else {}
    except AdapterUnavailableError:
        return {}
