"""A whole server, of a model of letters, that is acted on by HTTP and dies at a chosen point; as `living_process.py`.

Arguments: the folder of the contents, each in a folder of its own. It tells no state.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.content import adapter_digest
from tests.adapters.registration.registering_process import say
from tests.crashes.crashing import Order
from tests.crashes.living_process import begun, fork_for_each
from tests.stateful.letters import LETTERS
from tests.stateful.program import Program, our_model

MAX_LORAS = 40  # pins of all versions that there may be
Call = tuple[str, str, dict[str, Any] | None]


class Client:
    """Says each act by HTTP. `secrets`: of keys, in the order in which they were told."""

    def __init__(self, program: Program, root: Path, secrets: list[str]) -> None:
        self._program = program
        self._root = root
        self.secrets = list(secrets)

    def act(self, name: str, *arguments: Any) -> int:
        if name == "use_key":
            return self._use_key(*arguments)
        method, path, body = getattr(self, name)(*arguments)
        reply = self._program.call(method, path, body)
        if name == "create_key" and reply.status == 201:
            self.secrets.append(reply.json["secret"])
        return reply.status

    def register(self, name: str, content: int, activate: bool, pin: bool) -> Call:
        body = {"id": name, "source": str(self._content(content)), "activate": activate, "pin": pin}
        return "POST", "/admin/adapters", body

    def set_route(self, name: str, version: int | None, canary: tuple[int, float] | None) -> Call:
        wanted = canary and {"version": canary[0], "percent": canary[1]}
        return "PUT", f"/admin/adapters/{name}/route", {"version": version, "canary": wanted}

    def roll_back(self, name: str) -> Call:
        return "POST", f"/admin/adapters/{name}/rollback", None

    def delete(self, name: str, version: int | None) -> Call:
        return "DELETE", f"/admin/adapters/{name}" + (f"?version={version}" if version else ""), None

    def set_alias(self, alias: str, target: str) -> Call:
        name, at, content = target.partition("@content:")
        named = f"{name}@{adapter_digest(self._content(int(content)))}" if at else name
        return "PUT", f"/admin/aliases/{alias}", {"target": named}

    def remove_alias(self, alias: str) -> Call:
        return "DELETE", f"/admin/aliases/{alias}", None

    def set_pinned(self, name: str, pinned: bool) -> Call:
        return "POST", f"/admin/adapters/{name}/{'pin' if pinned else 'unpin'}", None

    def share(self, name: str, tenants: list[str]) -> Call:
        return "PUT", f"/admin/adapters/{name}/sharing", {"shared_with": tenants}

    def create_tenant(self, tenant: str) -> Call:
        return "POST", "/admin/tenants", {"name": tenant}

    def delete_tenant(self, tenant: str) -> Call:
        return "DELETE", f"/admin/tenants/{tenant}", None

    def create_key(self, tenant: str) -> Call:
        return "POST", f"/admin/tenants/{tenant}/keys", {"role": "inference"}

    def revoke_key(self, number: int, tenant: str) -> Call:
        return "DELETE", f"/admin/tenants/{tenant}/keys/{self.secrets[number].split('-')[1]}", None

    def _use_key(self, number: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._program.port, timeout=60)
        connection.request("GET", "/admin/whoami", headers={"Authorization": f"Bearer {self.secrets[number]}"})
        status = connection.getresponse().status
        connection.close()
        return 200 if status in (200, 401) else status

    def _content(self, number: int) -> Path:
        return self._root / LETTERS[number]


def run(root: Path, order: Order) -> None:
    points = begun(order)
    with our_model():
        program = Program(Path(order.store), root, MAX_LORAS, order.url or None, "lora_serve")
        program.start()
        say(f"ready {len(list(Path(order.store).glob('**/unnamed/*')))} {points.passed} -")
        client = Client(program, root, order.secrets)
        for number, act in enumerate(order.acts):
            before, known = points.passed, len(client.secrets)
            if order.kill and order.kill[0] == number:
                points.kill_in(order.kill[1])
            status = client.act(*act)
            say(" ".join([str(status), str(points.passed - before), *client.secrets[known:]]))
        if order.kill and order.kill[0] == len(order.acts):
            points.kill_in(order.kill[1])
        program.begin_stop()
        program.end_stop()
    sys.stdout.flush()
    os._exit(0)


def main(root: str) -> None:
    fork_for_each(lambda order: run(Path(root), order))


if __name__ == "__main__":
    main(*sys.argv[1:])
