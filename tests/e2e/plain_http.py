"""One HTTP call with the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """Status, body and headers, whatever the status."""

    status: int
    text: str
    headers: Mapping[str, str]  # names in any case

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def call(url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, method: str | None = None) -> Reply:
    """GET, or POST of `body` as JSON; or another method."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return Reply(response.status, response.read().decode(), response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read().decode(), error.headers)
