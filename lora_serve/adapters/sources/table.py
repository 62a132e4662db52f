"""Finds the source that a text names by its scheme. A new source is one file here and one line in `build_sources`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from lora_serve.adapters.checkpoint.artifact import check_files
from lora_serve.adapters.sources.archive_url import ArchiveUrlSource
from lora_serve.adapters.sources.base import AdapterSource, OnBytes, no_progress, refuse
from lora_serve.adapters.sources.connections import DEFAULT_TIMEOUTS, within
from lora_serve.adapters.sources.filesystem import PACKAGES, FilesystemSource
from lora_serve.adapters.sources.folder import FolderSource
from lora_serve.adapters.sources.hub import HubSource
from lora_serve.adapters.sources.redis_key import RedisKeySource
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

MAX_LENGTH = 4096  # of a source; URLs may have a signature
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_log = logging.getLogger(__name__)


class SourceTable:
    """Sources by scheme; "" stands for a folder, which has none."""

    def __init__(self, sources: Mapping[str, AdapterSource]) -> None:
        self._sources = dict(sources)

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes = no_progress) -> str:
        """See AdapterSource; `target` is removed after an error, and complete otherwise."""
        try:
            words = self._source_of(source).fetch(source, target, limit, within(DEFAULT_TIMEOUTS.total, progress))
            check_files(target)
        except OSError as error:
            remove_folder(target)
            _log.warning("fetching an adapter: %r", error)
            raise AdapterUnavailableError("The adapter's files cannot be read or written at present.") from None
        except BaseException:
            remove_folder(target)
            raise
        return words

    def _source_of(self, source: str) -> AdapterSource:
        if len(source) > MAX_LENGTH:
            raise refuse(f"`source` is longer than {MAX_LENGTH} characters.")
        match = _SCHEME.match(source)
        scheme = match[1].lower() if match else ""
        if scheme and (_UNPRINTABLE.search(source) or source != source.strip()):
            raise refuse("`source` holds a control character, or begins or ends with a space.")
        if scheme not in self._sources:
            known = ", ".join(f"{name}://" for name in self._sources if name)
            raise refuse(f"`source` begins with {scheme[:50]}://; what is known is a folder's path, {known}.")
        return self._sources[scheme]


def build_sources(config: AdapterConfig) -> SourceTable:
    """All sources. Raises ConfigError for a wrong --adapter-url, --redis-url or --tenant-source."""
    allowed = ("hf", "http", "https", *PACKAGES)  # folders and Redis keys may belong to any tenant
    if wrong := [scheme for scheme in config.tenant_source if scheme not in allowed]:
        raise ConfigError(f"--tenant-source: expected one of {', '.join(allowed)} (got {wrong[0][:200]!r})")
    archive_url = ArchiveUrlSource(config.adapter_url, allow_inner=config.adapter_url_inner)
    return SourceTable(
        {
            "": FolderSource(config.adapter_root),
            "hf": HubSource(),
            "http": archive_url,
            "https": archive_url,
            "redis": RedisKeySource(config.redis_url, config.redis_prefix),
            **{scheme: FilesystemSource(scheme, package) for scheme, package in PACKAGES.items()},
        }
    )
