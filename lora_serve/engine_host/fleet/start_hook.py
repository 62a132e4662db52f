"""A hook into `ray start` (RAY_START_HOOK), which has no flag for it."""

from __future__ import annotations

from typing import Any

PATH = f"{__name__}.without_client_server"


def without_client_server(parameters: Any, is_head: bool) -> None:
    """Leaves out the server for `ray://`, a process and a port that no fleet uses."""
    parameters.ray_client_server_port = None
