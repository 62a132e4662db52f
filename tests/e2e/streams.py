"""Streams, each read on a thread of its own: long answers, and live views."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.processes import PATIENCE


class Stream(threading.Thread):
    """Reads one long streamed answer; `started` once its first event came."""

    def __init__(self, process: ServerProcess, name: str = "tiny", max_tokens: int = 90) -> None:
        super().__init__(daemon=True)
        self.url = f"{process.url}/v1/completions"
        self.body = {
            "model": name, "prompt": [5], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
            "stream": True,
        }  # fmt: skip
        self.events: list[Any] = []
        self.is_done = self.is_cut = False
        self.status = 0
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        request = urllib.request.Request(self.url, json.dumps(self.body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                self.status = response.status
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        self.is_done = True
                    elif line.startswith(b"data: "):
                        self.events.append(json.loads(line[6:]))
                        self.started.set()
        except urllib.error.HTTPError as error:
            self.status = error.code
            error.close()
        except (OSError, http.client.HTTPException):
            self.is_cut = True
        finally:
            self.started.set()


class View(threading.Thread):
    """Reads a live view to its end; `started` once its first frame came."""

    def __init__(self, process: ServerProcess, headers: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.request = urllib.request.Request(f"{process.url}/admin/engine/stream?rate=10", headers=dict(headers))
        self.events: list[tuple[str, Any]] = []
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.request, timeout=PATIENCE) as response:
                for line in response:
                    if line.startswith(b"event: "):
                        data = next(response).removeprefix(b"data: ")
                        self.events.append((line[7:].decode().strip(), json.loads(data)))
                    if len(self.events) > 1:
                        self.started.set()
        finally:
            self.started.set()
