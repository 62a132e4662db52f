"""The arguments of a fleet's application, as a RayService of KubeRay has them: settings by name. No Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import SECRETS, Settings, describe
from lora_serve.core.vllm.taking import parsed_keys, taken


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Settings as `--config`'s file would have them, `engine` being ray. Neither the environment nor a folder is looked
    at: the machine that builds the application need not have the model. Raises ConfigError, a line per wrong setting.
    """
    if shown := [name for name in SECRETS if name in arguments]:
        variables = ", ".join(f"LORA_SERVE_{name.upper()}" for name in shown)
        raise ConfigError(f"{', '.join(shown)}: Ray shows an application's arguments; set {variables} in its pods")
    given = {"engine": "ray"} | taken(parsed_keys(arguments))[0]
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError(describe(error, dict.fromkeys(given, "in the application's arguments"))) from None
    if settings.engine != "ray":
        raise ConfigError(f"--engine: a fleet's is ray (got {settings.engine!r} in the application's arguments)")
    return settings
