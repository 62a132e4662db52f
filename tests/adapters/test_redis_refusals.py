"""A refusal of a real Redis is told as what it is; "cannot be reached" is for no connection."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import redis as client_library

from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.journals.redis import RedisJournal
from lora_serve.adapters.redis_connection import said
from lora_serve.core.errors import AdapterUnavailableError
from tests.redis_server import RedisServer

SETTINGS = {
    "NOAUTH": {"requirepass": "secret"},
    "WRONGPASS": {"requirepass": "secret"},
    "OOM": {"maxmemory": "1"},
    "READONLY": {"replicaof": "127.0.0.1 1"},
}


@pytest.mark.parametrize("code", SETTINGS)
def test_refusal_of_a_real_redis_is_told(tmp_path: Path, code: str) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        with server.client() as client:
            for name, value in SETTINGS[code].items():
                if name == "replicaof":
                    client.replicaof(*value.split())
                else:
                    client.config_set(name, value)
        url = server.url.replace("redis://", "redis://:wrong@") if code == "WRONGPASS" else server.url
        with closing(RedisJournal(url)) as journal, pytest.raises(AdapterUnavailableError, match=rf"\({code}\)"):
            journal.commit(Position(), {"adapter:x": "{}"})
    finally:
        server.stop()
    with closing(RedisJournal(server.url)) as journal, pytest.raises(AdapterUnavailableError, match="be reached"):
        journal.load()


def test_protected_mode_and_loading_are_told() -> None:
    assert "(DENIED)" in said(client_library.ResponseError("DENIED Redis is running in protected mode"))
    assert "(LOADING)" in said(client_library.BusyLoadingError("Redis is loading the dataset in memory"))
