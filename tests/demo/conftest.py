"""A real server with the demo's model and adapters, and what their registrations say of their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from openai import OpenAI

from lora_serve.commands.demo import DATA, adapter_folders, demo_arguments
from tests.e2e.conftest import ADMIN, KEY
from tests.e2e.plain_http import call
from tests.engine_choice import EngineHost


@pytest.fixture(scope="session")
def openai(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    root = tmp_path_factory.mktemp("demo")
    arguments = [*demo_arguments(root / "store", adapter_folders()), "--admin-key", KEY]
    with engine_host.serving(arguments, root / "log") as process:
        for name, metadata in json.loads((DATA / "metadata.json").read_text()).items():
            reply = call(f"{process.url}/admin/adapters/{name}", {"metadata": metadata}, ADMIN, method="PATCH")
            assert reply.status == 200, reply.text
        with OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
