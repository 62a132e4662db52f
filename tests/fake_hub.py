"""The few calls of the hub's HTTP API that the hub's own client makes for single files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from tests.http_thread import break_off

COMMIT = hashlib.sha1(b"the newest").hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class FakeHub:
    """Repositories by name; each holds files by path. `asked` keeps method and path of all that was asked."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # repositories whose downloads break off, then fail
    status: int = 0  # of every answer, if not 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    etag_of: Callable[[bytes], str] = _git_sha1
    damage: Callable[[str, bytes], bytes] = lambda path, content: content
    tokens: list[str | None] = field(default_factory=list)
    elsewhere: str = ""  # the beginning of URLs to which every GET is redirected

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        return app

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        repo, path = "{org}/{name}".format(**request.match_info), request.match_info["path"]
        self.asked.append((request.method, path))
        self.tokens.append(request.headers.get("Authorization"))
        if self.status:
            return web.Response(status=self.status)
        if repo in self.gated:
            return web.Response(status=403, headers={"X-Error-Code": "GatedRepo"})
        if repo not in self.repos:
            return web.Response(status=401, headers={"X-Error-Code": "RepoNotFound"})
        commit = self.revisions.get(request.match_info["revision"])
        if commit is None:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        headers = {"X-Repo-Commit": commit}
        if path not in self.repos[repo]:
            return web.Response(status=404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        content = self.repos[repo][path]
        if self.elsewhere and request.method == "GET":
            raise web.HTTPFound(self.elsewhere + request.path)
        headers["ETag"] = f'"{self.etag_of(content)}"'
        if repo in self.broken and request.method == "GET":
            self.status = 500
            return await break_off(request, content, headers)
        return web.Response(body=self.damage(path, content), headers=headers)
