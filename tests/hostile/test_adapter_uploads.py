"""Uploads of ruined adapters: refused in words, nothing stored, nothing served, nobody disturbed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.canary.house import ADMIN, House
from tests.canary.questions import World
from tests.faults.injecting import settle
from tests.hostile.adapter_files import (
    ARCHIVES,
    CONFIG,
    CONFIG_TEXTS,
    CONFIGS,
    WEIGHT_FILES,
    WEIGHTS,
    Files,
    files_of,
    tar,
)
from tests.hostile.sending import Reply, as_admin, assert_refused, call, post


@pytest.fixture(scope="module")
def house_settings() -> dict[str, int]:
    return {"max_upload_size": 2**20}


@pytest.fixture(scope="module")
def sound(world: World) -> Files:
    return files_of(world.adapters["acme/a"])


@pytest.fixture(autouse=True)
def _nothing_stays(house: House) -> Iterator[None]:
    blobs = house.store / "blobs"
    before, entries = sorted(blobs.iterdir()), house.services.catalog.snapshot.entries
    yield
    settle(lambda: sorted(blobs.iterdir()) == before)
    assert house.services.catalog.snapshot.entries == entries


def upload(house: House, content: bytes) -> Reply:
    name = f"bad/{uuid.uuid4().hex}"
    kind = {"Content-Type": "application/octet-stream"}
    reply = call(house, "PUT", f"/admin/adapters/{name}", content, {**ADMIN, **kind})
    assert post(house, "/v1/completions", {"model": name, "prompt": "x"}).status == 404
    return reply


def test_sound_adapter_is_taken_so_that_refusals_mean_something(house: House, sound: Files) -> None:
    assert call(house, "PUT", "/admin/adapters/good/a", tar(sound), dict(ADMIN)).status == 201
    assert as_admin(house, "DELETE", "/admin/adapters/good/a").status in (200, 204)


@pytest.mark.parametrize("name", ARCHIVES)
def test_ruined_archive_is_refused(house: House, sound: Files, name: str) -> None:
    assert_refused(house, upload(house, ARCHIVES[name](sound)), (400, 413, 422))


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_ruined_weights_are_refused(house: House, sound: Files, name: str) -> None:
    weights = WEIGHT_FILES[name](sound[WEIGHTS])
    assert weights != sound[WEIGHTS]
    assert_refused(house, upload(house, tar({**sound, WEIGHTS: weights})), 422)


@pytest.mark.parametrize("name", CONFIGS)
def test_ruined_config_is_refused(house: House, sound: Files, name: str) -> None:
    config = json.dumps(json.loads(sound[CONFIG]) | CONFIGS[name]).encode()
    assert_refused(house, upload(house, tar({**sound, CONFIG: config})), (413, 422))


@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_config_that_is_no_sound_json_is_refused(house: House, sound: Files, name: str) -> None:
    assert_refused(house, upload(house, tar({**sound, CONFIG: CONFIG_TEXTS[name]})), 422)


def test_template_and_code_beside_an_adapter_are_never_read(house: House, sound: Files) -> None:
    """They are passed over: what is served is the two files, and the base's own template."""
    extras = {
        "chat_template.jinja": b"{{ 7 * 7 }}",
        "modeling.py": b"raise SystemExit",
        "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": "modeling.X"}}',
        "adapter_model.bin": b"\x80\x04.",
    }
    reply = call(house, "PUT", "/admin/adapters/good/extras", tar({**sound, **extras}), dict(ADMIN))
    assert reply.status in (201, 422)
    if reply.status == 201:
        digest = reply.json["digest"].removeprefix("sha256:")
        kept = {path.name for path in (house.store / "blobs" / digest).iterdir()}
        assert not kept & set(extras)
        as_admin(house, "DELETE", "/admin/adapters/good/extras")
