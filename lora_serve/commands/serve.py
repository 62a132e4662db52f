"""`lora-serve serve`: the server, until it is told to stop."""

from __future__ import annotations

import gc
import importlib
import os
import sys

_ENTRANCES = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils")


def run(arguments: list[str]) -> int:
    """Reads the settings, imports only the libraries that they need, then serves. Returns the exit code."""
    from lora_serve.core.process import without_collections

    with without_collections():
        from lora_serve.core.settings import command_line
        from lora_serve.logs.writer import open_standard_descriptors
        from lora_serve.model.system.process import load_torch_library, read_weights

        open_standard_descriptors()
        settings, notes = command_line(arguments)
        read_weights(settings.model)
        if settings.engine in ("process", "ray"):
            from lora_serve.app.early_checks import check_start

            check_start(settings)
            import_tokenizers()
        else:
            load_torch_library()
            from lora_serve.app.early_checks import check_start

            check_start(settings)
            from lora_serve.model.loading.transformers_import import import_transformers

            import_transformers(settings.quantization, settings.model)
        from lora_serve.app import launch

        gc.freeze()
    return launch.serve(settings, notes)


def import_tokenizers() -> None:
    """Imports transformers' tokenizers as if torch were not installed, for a server whose engine runs in another
    process; to be called once, before anything imports transformers.
    """
    assert "torch" not in sys.modules, "it is too late"
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that models need torch
    for name in _ENTRANCES:
        importlib.import_module(name)
