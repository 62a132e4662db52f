"""`serve --engine ray` as a user starts it, on a cluster of its own."""

from __future__ import annotations

import os
import signal
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import LOOPBACK, PATIENCE, descendants_of, eventually, is_alive, listening
from tests.e2e.streams import Stream
from tests.e2e.test_openai_client import ASK, MODELS, check_with_peft, prompt
from tests.engine_choice import hosted_by
from tests.oracle import load_peft, save_adapter


def answers_anybody(port: int) -> bool:
    """Whether somebody without a token is shown metrics there."""
    try:
        return bool(call(f"http://127.0.0.1:{port}/metrics").status == 200)
    except (OSError, HTTPException):
        return False  # another protocol


def pids_of_replicas(url: str) -> set[int]:
    return {card["pid"] for card in call(f"{url}/admin/fleet", headers=ADMIN).json["data"]}


@pytest.mark.timeout(300)
def test_fleet_answers_as_peft_takes_an_adapter_and_leaves_no_process(files: Site, tmp_path: Path) -> None:
    late = save_adapter(files.model, files.root / "late", seed=31, r=4)
    oracle = load_peft(files.model, {**files.adapters, "late": late})
    arguments = files.arguments("fleet", "--replicas", "2..2", "--warmup", "off", *files.modules())
    with hosted_by("ray").serving(arguments, tmp_path / "log") as server:
        started = descendants_of(server.pid)
        found = listening([server.pid, *started])
        assert {address for address, _ in found} <= LOOPBACK
        assert {port for _, port in found if answers_anybody(port)} == {urlsplit(server.url).port}
        eventually(
            lambda: len(pids_of_replicas(server.url) & set(descendants_of(server.pid))) == 2,
            "a replica has no pid",
        )
        streams = [Stream(server, name) for name in MODELS]
        assert call(f"{server.url}/admin/adapters", {"id": "late", "source": str(late)}, ADMIN).status == 201
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            for seed, name in enumerate((*MODELS, "late")):
                raw = client.completions.with_raw_response.create(model=name, prompt=prompt(20, seed), **ASK)
                check_with_peft(oracle, name, prompt(20, seed), raw.parse().choices[0])
                replicas = call(f"{server.url}/admin/fleet", headers=ADMIN).json["replicas"]
                assert raw.headers["X-Replica-Id"] in {one["id"] for one in replicas}
        for stream in streams:
            stream.join(PATIENCE)
        assert all(stream.is_done for stream in streams)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0
    assert "ending Ray's processes" in (tmp_path / "log").read_text()
    eventually(lambda: not any(map(is_alive, started)), "Ray's processes outlive their server")
