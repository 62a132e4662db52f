"""The house of tests/server and the site of tests/e2e, for tests that are about keeping tenants apart."""

from __future__ import annotations

from tests.e2e.conftest import files, site
from tests.server.conftest import (
    adapter_config,
    admin,
    auth_required,
    catalog,
    directory,
    house,
    http,
    make_adapter,
    server_config,
    services,
    sources,
    spec,
    text_model,
    verifier,
)

__all__ = [
    "adapter_config",
    "admin",
    "auth_required",
    "catalog",
    "directory",
    "files",
    "house",
    "http",
    "make_adapter",
    "server_config",
    "services",
    "site",
    "sources",
    "spec",
    "text_model",
    "verifier",
]
