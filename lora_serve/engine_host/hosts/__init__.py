"""The engine hosts: one file for each value of --engine, which is the file's name. The folder is the list.

A new host is a new file here and is named nowhere else. The file has the two functions of `base.EngineHostModule`:
`open_host`, a context manager that gives an `EngineHost`, and `use_one_core`, called first on the server's threads. The
host's client is a `client.base.EngineClient`, for instance a `MessageClient` over another transport; its engine is
`local.LocalEngine` or, behind a connection, `service.EngineService`, which take and give the messages of
`core/messages.py`. `tests/contracts/test_engine_client.py` says what every client must do.

One server has one engine, or one fleet that looks like one: gate, figures, desired state and supervisor are single
objects behind `Services.client`.
"""

from __future__ import annotations

import importlib
from typing import cast

from lora_serve.engine_host.hosts.base import EngineHostModule


def engine_host_module(name: str) -> EngineHostModule:
    """The file for a value of --engine."""
    return cast(EngineHostModule, importlib.import_module(f"{__name__}.{name}"))
