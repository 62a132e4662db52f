"""Every client's checks pass (the nightly tier; the environments take minutes the first time)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.running import CLIENTS, Client, demo_server, results_of

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with demo_server(tmp_path_factory.mktemp("clients")) as found:
        yield found


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_check_of_a_client_passes(client: Client, server: dict[str, str]) -> None:
    results = results_of(client, server)

    assert [result for result in results if result["error"] is not None] == []
