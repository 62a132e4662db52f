"""Imports transformers' tokenizers without torch: for a server whose engine runs in another process."""

from __future__ import annotations

import importlib
import os
import sys

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_ENTRANCES = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils")


def import_tokenizers() -> None:
    """Imports the tokenizers as if torch were not installed; call it once, before anything imports transformers."""
    assert "torch" not in sys.modules, "it is too late"
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault(_ADVICE, "1")  # no warning that models need torch
    for name in _ENTRANCES:
        importlib.import_module(name)
