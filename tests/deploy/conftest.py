"""The chart, rendered once for all tests of a worker; one scrape of a real server."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.commands.server_process import ServerProcess
from lora_serve.core.settings import Settings
from tests.deploy.rendering import EXAMPLES, MORE, ROOT, Rendered, parsed, rendered
from tests.deploy.wrong_values import WRONG


@pytest.fixture(scope="session")
def said() -> tuple[dict[str, dict[str, str] | str], dict[str, Any]]:
    """All that Helm is asked, in one go."""
    wrong = {f"wrong: {name}": values for name, (values, _) in WRONG.items()}
    return rendered(MORE | EXAMPLES | wrong)


@pytest.fixture(scope="session")
def renderings(said: tuple[dict[str, dict[str, str] | str], dict[str, Any]]) -> dict[str, Rendered]:
    """By name: those of the examples, and those that the tests add."""
    found = {}
    for name in MORE | EXAMPLES:
        answer = said[0][name]
        assert isinstance(answer, dict), f"{name}: {answer}"
        found[name] = parsed(answer)
    return found


@pytest.fixture(scope="session")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[frozenset[str]]]:
    """Sample name -> the sets of labels that it has, at a server on the bundled model that has answered a request."""
    folder = tmp_path_factory.mktemp("scraped")
    demo = ROOT / "lora_serve" / "demo_data"
    arguments = ["--model", str(demo / "model"), "--served-model-name", "base", "--store", str(folder / "store")]
    arguments += ["--lora-modules", f"acme/sql={demo / 'adapters' / 'acme' / 'sql'}", "--warmup", "off"]
    arguments += ["--kv-cache-memory", "8MiB"]
    with ServerProcess(arguments, folder / "log") as server:
        server.wait_until_ready(120)
        ask(server.url + "/v1/completions", {"model": "acme/sql", "prompt": "a b", "max_tokens": 3})
        text = ask(server.url + "/metrics")
    found: dict[str, set[frozenset[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(frozenset(sample.labels))
    return found


def ask(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No setting of the machine that runs the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORA_SERVE_{name.upper()}", raising=False)
    return monkeypatch
