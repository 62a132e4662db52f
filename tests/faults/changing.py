"""Registrations and deletions in a row until the server is killed, and what must be there afterwards."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from lora_serve.commands.server_process import ServerProcess
from tests.canary.house import ADMIN

CAME_AGAIN = (503,)  # the engine was lost meanwhile: neither done nor not


class Changes:
    """`there`: ids by name, whether they are there, as the server acknowledged it last; what was under way may be
    either.
    """

    def __init__(self, folder: Path) -> None:
        self.there: dict[str, bool] = {}
        self.num_done = 0  # changes that were acknowledged
        self._folder = folder

    def until_dead(self, process: ServerProcess, life: str, after: Callable[[int], None]) -> None:
        """One change after the other; `after` is told how many there were."""
        name, number = "", 0
        try:
            while True:
                name = f"{life}/{number // 2}"
                is_there = number % 2 == 0 or number % 6 == 1
                self._change(process, name, is_there)
                number += 1
                after(number)
        except (OSError, http.client.HTTPException):
            self.there.pop(name, None)

    def assert_kept(self, process: ServerProcess) -> None:
        listed = ids_of(process)
        for name, is_there in self.there.items():
            assert (name in listed) == is_there, name

    def _change(self, process: ServerProcess, name: str, is_there: bool) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)) as connection:
            if is_there:
                body = json.dumps({"id": name, "source": str(self._folder)})
                connection.request("POST", "/admin/adapters", body, {**ADMIN, "Content-Type": "application/json"})
            else:
                connection.request("DELETE", f"/admin/adapters/{name}", headers=ADMIN)
            status = connection.getresponse().status
        if status in CAME_AGAIN:
            self.there.pop(name, None)
            threading.Event().wait(0.1)
            return
        assert status in (200, 201) or (not is_there and status == 404 and name not in self.there), status
        self.there[name] = is_there
        self.num_done += 1


def ids_of(process: ServerProcess) -> set[str]:
    """Of all models that it lists."""
    with closing(http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)) as connection:
        connection.request("GET", "/v1/models")
        return {card["id"] for card in json.loads(connection.getresponse().read())["data"]}
