"""A registry with its verifier at hand: registers in one call what a server registers in steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.checkpoint.chat_template import BaseTemplates
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.registration.registry import Registered, Registry, private_folder
from lora_serve.adapters.registration.verification import AdapterVerifier
from lora_serve.adapters.sources.base import RegistrationProgress, Stage, Staged
from lora_serve.adapters.sources.folder import copy_files, find_folder
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.client.verifier import carried_out
from lora_serve.core.config import AdapterConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.tenant import NO_LIMITS, Quota


class VerifyingRegistry(Registry):
    """`quota_of`: a tenant's quota."""

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
        super().__init__(config, spec, catalog, store, base_tokens, base_templates)
        self._verifier = verifier
        self._quota_of = quota_of

    def register_folder(self, name: str, folder: str | Path, trusted: bool = False, **fields: Any) -> Registered:
        """`trusted`: named by a flag, so the roots do not apply. `fields`: of the Registration."""
        registration = self._wanted(name, fields | {"by_admin": True})
        registration.check(self._catalog.snapshot)
        roots = None if trusted else self._config.adapter_root
        found = Path(folder) if roots is None else find_folder(folder, roots)
        with private_folder(self.new_folder) as copy:
            copy_files(found, copy, self._config.max_upload_size, roots)
            return self._registered(registration, Staged(copy, f"folder {folder}"))

    def register_staged(self, name: str, folder: Path, source: str = "upload", **fields: Any) -> Registered:
        with private_folder(lambda: folder):
            return self._registered(self._wanted(name, fields), Staged(folder, source))

    def _wanted(self, name: str, fields: dict[str, Any]) -> Registration:
        wanted = Registration(id=name, **fields)
        return Registration(id=name, quota=self._quota_of(wanted.owner_in(self._catalog.snapshot)), **fields)

    def _registered(self, registration: Registration, staged: Staged) -> Registered:
        progress = RegistrationProgress(registration.id, None, Stage.FETCHING)
        return carried_out(self.register(registration, staged, progress), self._verifier)
