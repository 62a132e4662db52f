"""A long streamed answer, read on a thread of its own."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
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
