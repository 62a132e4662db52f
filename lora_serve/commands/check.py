"""`lora-serve check`: validates an adapter against a base model, with no server running."""

from __future__ import annotations

from pathlib import Path

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import resolve_settings, settings_parser


def run(arguments: list[str]) -> int:
    """Prints what a server with these settings would do with the adapter. Returns the exit code."""
    parser = settings_parser("lora-serve check", "Validate an adapter: what the server would reject, and why.")
    parser.add_argument("adapter_dir", metavar="ADAPTER_DIR", help="folder with adapter_config.json and its weights")
    values = parser.values(arguments)
    folder = Path(values.pop("adapter_dir"))
    settings = resolve_settings(values)
    if not folder.is_dir():
        raise ConfigError(f"ADAPTER_DIR: {folder} is not a folder")
    from lora_serve.app.early_checks import check_hub
    from lora_serve.commands import adapter_check

    check_hub(settings.model)
    return adapter_check.run(folder, settings)
