"""`lora-serve serve`: the server, until it is told to stop."""

from __future__ import annotations


def run(arguments: list[str]) -> int:
    """Reads the settings, imports only the libraries that they need, then serves. Returns the exit code."""
    from lora_serve.app.early_checks import check_start
    from lora_serve.core.settings import command_line
    from lora_serve.logs.streams import open_standard_descriptors

    open_standard_descriptors()
    settings, notes = command_line(arguments)
    check_start(settings)
    if settings.engine == "process":
        from lora_serve.app.lean_imports import import_tokenizers

        import_tokenizers()
    else:
        from lora_serve.model.loading.transformers_import import import_transformers

        import_transformers(settings.quantization, settings.model)
    from lora_serve.app import launch

    return launch.serve(settings, notes)
