"""The site of tests/e2e, for fleets."""

from __future__ import annotations

from tests.e2e.conftest import files, site

__all__ = ["files", "site"]
