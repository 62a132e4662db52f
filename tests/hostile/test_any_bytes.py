"""Whatever bytes come, as a body, as HTTP or as an adapter's files: an answer or a refusal, never a 5xx."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.server.schemas.inference import ChatFields, CompletionFields
from tests.canary.house import ADMIN, House
from tests.canary.questions import TENANTS, World
from tests.hostile.adapter_files import CONFIG, WEIGHTS, Files, files_of, tar
from tests.hostile.sending import assert_tells_nothing, call, post, send

NAMES = ("acme/a", "tiny", "no/such", *(f"{tenant}/b" for tenant in TENANTS))
WORDS = st.text(max_size=12) | st.sampled_from(NAMES)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*CompletionFields.model_fields, *ChatFields.model_fields, "tools", "response_format", "best_of"})
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-1, 20),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "top_k": st.integers(-2, 500),
    "logprobs": st.integers(-1, 25) | st.booleans(),
    "stop": st.lists(st.text(max_size=5), max_size=20) | st.text(max_size=5),
    "logit_bias": st.dictionaries(st.integers(-1, 500).map(str), st.floats(-200, 200), max_size=5),
    "model": st.sampled_from(NAMES),
    "adapters": st.lists(st.fixed_dictionaries({"id": WORDS, "scale": st.floats(-200, 200)}), max_size=3),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "seed": st.integers(-(2**64), 2**64),
}
BODIES = st.fixed_dictionaries({}, optional={name: LIKELY.get(name, VALUES) | VALUES for name in FIELDS})


@given(body=BODIES, is_chat=st.booleans())
def test_any_fields_are_answered_or_refused(house: House, body: dict[str, Any], is_chat: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    limited = {**prompt, **body, "max_tokens": 2, "timeout_ms": 20_000}
    limited.pop("max_completion_tokens", None)
    reply = post(house, "/v1/chat/completions" if is_chat else "/v1/completions", limited)
    assert reply.status in (200, 400, 404), (reply.status, reply.body[:300])
    assert_tells_nothing(house, reply)


@given(raw=st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_refused_or_answered(house: House, raw: bytes) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        reply = post(house, path, raw)
        assert reply.status in (200, 400, 404), (reply.status, reply.body[:300])


@given(
    start=st.sampled_from([b"", b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"]),
    rest=st.binary(max_size=300),
    end=st.sampled_from([b"", b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n{}  "]),
)
def test_any_bytes_on_a_socket_end_in_a_4xx_or_in_silence(house: House, start: bytes, rest: bytes, end: bytes) -> None:
    reply = send(house, start + rest + end, half_close=True)
    assert reply.status < 500
    assert_tells_nothing(house, reply)


@pytest.fixture(scope="module")
def sound(world: World) -> Files:
    """Its config says nothing of this machine, so that what is said of it does not either."""
    files = files_of(world.adapters["acme/a"])
    config = json.loads(files[CONFIG]) | {"base_model_name_or_path": "base"}
    return {**files, CONFIG: json.dumps(config).encode()}


@given(data=st.data())
def test_any_change_of_an_adapters_files_is_taken_or_refused(house: House, sound: Files, data: st.DataObject) -> None:
    files = dict(sound)
    if data.draw(st.booleans(), "config"):
        changes = st.dictionaries(st.sampled_from(sorted(json.loads(sound[CONFIG]))), VALUES, min_size=1, max_size=3)
        files[CONFIG] = json.dumps(json.loads(sound[CONFIG]) | data.draw(changes)).encode()
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        name = data.draw(st.sampled_from([CONFIG, WEIGHTS]))
        place = data.draw(st.integers(0, min(len(files[name]) - 1, 4000)))
        byte = bytes([data.draw(st.integers(0, 255))])
        files[name] = files[name][:place] + byte + files[name][place + 1 :]
    path = f"/admin/adapters/any/{uuid.uuid4().hex}"
    reply = call(house, "PUT", path, tar(files), dict(ADMIN))
    assert reply.status in (201, 413, 422), (reply.status, reply.body[:500])
    assert_tells_nothing(house, reply)
    if reply.status == 201:
        assert call(house, "DELETE", path, None, dict(ADMIN)).status == 200
