"""A server process behind a certificate."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from lora_serve.commands.server_process import HOST, ServerProcess


class HttpsServer(ServerProcess):
    """As its parent, behind a certificate of an authority that only we know."""

    def __init__(self, context: ssl.SSLContext, arguments: list[str], log: Path) -> None:
        super().__init__(arguments, log)
        self.url = f"https://{HOST}:{self.port}"
        self._context = context

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5, context=self._context) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False
