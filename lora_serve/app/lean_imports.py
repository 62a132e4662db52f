"""Imports transformers' tokenizers without torch: for a server whose engine runs in another process."""

from __future__ import annotations

import importlib
import os
import sys

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_ENTRANCES = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils")


def import_tokenizers() -> None:
    """Once per process, before anything else imports transformers or torch, which seems to be absent from then on."""
    assert "torch" not in sys.modules, "it is too late"
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault(_ADVICE, "1")  # that models cannot be used without torch is known
    for name in _ENTRANCES:
        importlib.import_module(name)
