"""What every part of the tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.canary.watch", "tests.faults.injecting", "tests.hostile.sending")

from tests.redis_server import RedisServer  # noqa: E402

# Triton reads it when it is first imported: its programs run in its interpreter, on tensors of the CPU.
# tests/gpu compile them instead (scripts/gpu_check).
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of this process that leave it running."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """Of an empty database."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may kill; it keeps an append-only file."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), append_only=True)
    server.start()
    yield server
    server.stop()
