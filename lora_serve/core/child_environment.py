"""The environment of children that a server and its tools start: their settings come by other ways."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "LORA_SERVE_"
KERNELS = "LORA_SERVE_KERNELS"  # the level of the native kernels: no setting, and for every process of this machine


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without settings (LORA_SERVE_X), as there are secrets among them; KERNELS stays."""
    return {name: text for name, text in environment.items() if not name.startswith(PREFIX) or name == KERNELS}
