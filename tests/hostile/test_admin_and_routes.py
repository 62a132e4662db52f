"""Tricks in paths, ids, keys and admin bodies: nothing is found, nothing is registered, nothing is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.canary.house import ADMIN, KEY, House
from tests.hostile.sending import as_admin, assert_refused, call

PATHS = [
    "/v1/models/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/models/%252e%252e%252fetc",
    "/v1/models/..%5c..%5cwindows",
    "/v1/models/acme/a%00",
    "/v1/models/acme/a%0d%0aX-Evil:%201",
    "/v1/models/%c0%ae%c0%ae/",
    "/v1/models/%uff0e%uff0e/",
    "/v1/models/acme/a/",
    "/v1/models//acme/a",
    "/v1/models/acme/./a",
    "/v1/models/acme/a;version=1",
    "/v1/models/acme/a%23x",
    "/v1/models/" + "a/" * 2000,
    "/v1/models/%F0%9F%92%A9",
    "/v1/models/",
    "/v1//completions",
    "/v1/../admin/engine",
    "/%61dmin/engine",
    "/admin/engine/",
    "/admin/%65ngine",
    "/admin/../metrics",
    "/..%2f..%2fetc/passwd",
    "/.env",
    "/.git/config",
    "/static/../../etc/passwd",
    "//evil.example/admin/engine",
    "/admin/adapters/%2e%2e%2f%2e%2e",
    "/admin/adapters/acme/a/route/../../engine",
    "/metrics/../admin/engine",
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:40])
def test_trick_in_a_path_finds_nothing(house: House, path: str) -> None:
    assert_refused(house, call(house, "GET", path), (400, 401, 404))


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "HEAD", "CONNECT", "FOO", "get"])
def test_method_that_is_not_meant_is_refused(house: House, method: str) -> None:
    for path in ("/v1/completions", "/admin/engine"):
        reply = call(house, method, path)
        assert reply.status in (400, 401, 404, 405), (method, path, reply)


KEYS: dict[str, str] = {
    "none": "",
    "no_scheme": KEY,
    "basic": "Basic YWRtaW46YWRtaW4=",
    "wrong": "Bearer " + "x" * len(KEY),
    "beginning": "Bearer " + KEY[:-1],
    "longer": f"Bearer {KEY}x",
    "two_words": f"Bearer {KEY} {KEY}",
    "two_schemes": f"Bearer Bearer {KEY}",
    "other_case": "Bearer " + KEY.upper(),
    "quoted": f'Bearer "{KEY}"',
    "with_comma": f"Bearer x, Bearer {KEY}",
    "latin_1": "Bearer \xe4\xf6\xfc",
    "giant": "Bearer " + "k" * 8000,
    "spaces": "Bearer" + " " * 100,
    "template": "Bearer {{key}}",
    "percent": "Bearer %s%s%n",
    "looks_like_a_tenants": "Bearer ls-abcdefghijkl-" + "A" * 43,
}


@pytest.mark.parametrize("name", KEYS)
def test_key_that_is_none_opens_no_admin_door(house: House, name: str) -> None:
    for method, path in (("GET", "/admin/engine"), ("DELETE", "/admin/adapters/acme/a"), ("PUT", "/admin/engine")):
        assert_refused(house, call(house, method, path, b"{}", {"Authorization": KEYS[name]}), (400, 401))


def test_key_in_the_wrong_place_opens_nothing(house: House) -> None:
    for path in (
        f"/admin/engine?key={KEY}",
        f"/admin/engine?api_key={KEY}",
        f"/admin/engine?Authorization=Bearer {KEY}",
    ):
        assert_refused(house, call(house, "GET", path.replace(" ", "%20")), 401)
    for name in ("X-Api-Key", "Cookie", "Proxy-Authorization", "X-Forwarded-Authorization"):
        assert_refused(house, call(house, "GET", "/admin/engine", None, {name: f"Bearer {KEY}"}), 401)


def test_header_names_who_asks_no_more_than_the_body(house: House) -> None:
    """Nobody becomes another tenant, or local, by saying so."""
    claims = {"X-Forwarded-For": "127.0.0.1", "X-Tenant": "acme", "X-Real-Ip": "127.0.0.1", "X-Admin": "true"}
    assert_refused(house, call(house, "GET", "/admin/engine", None, claims), 401)


BODIES: dict[str, tuple[str, str, Any]] = {
    "register_nothing": ("POST", "/admin/adapters", {}),
    "register_list": ("POST", "/admin/adapters", []),
    "register_null_source": ("POST", "/admin/adapters", {"id": "x/y", "source": None}),
    "register_deep_metadata": ("POST", "/admin/adapters", b'{"id": "x/y", "source": "z", "metadata": ' + b"[" * 10**5),
    "register_proc": ("POST", "/admin/adapters", {"id": "x/y", "source": "/proc/self/root"}),
    "register_dev": ("POST", "/admin/adapters", {"id": "x/y", "source": "/dev/zero"}),
    "register_parent": ("POST", "/admin/adapters", {"id": "x/y", "source": "adapters/../../.."}),
    "register_nul": ("POST", "/admin/adapters", {"id": "x/y", "source": "adapters\x00"}),
    "register_long": ("POST", "/admin/adapters", {"id": "x/y", "source": "a" * 100_000}),
    "register_file_url": ("POST", "/admin/adapters", {"id": "x/y", "source": "file:///etc/passwd"}),
    "register_metadata_service": ("POST", "/admin/adapters", {"id": "x/y", "source": "http://169.254.169.254/x.tar"}),
    "register_loopback": ("POST", "/admin/adapters", {"id": "x/y", "source": "http://127.0.0.1:1/x.tar"}),
    "register_gopher": ("POST", "/admin/adapters", {"id": "x/y", "source": "gopher://127.0.0.1:6379/_FLUSHALL"}),
    "register_user_in_url": ("POST", "/admin/adapters", {"id": "x/y", "source": "https://a:b@c/x.tar"}),
    "register_id_list": ("POST", "/admin/adapters", {"id": ["x"], "source": "z"}),
    "register_bidi_id": ("POST", "/admin/adapters", {"id": "x/\u202ey", "source": "z"}),
    "register_reserved_base": ("POST", "/admin/adapters", {"id": "tiny", "source": "adapters/acme/a"}),
    "register_foreign_id": ("POST", "/admin/adapters", {"id": "acme/a", "source": "adapters/globex/a", "tenant": "g"}),
    "route_to_nowhere": ("PUT", "/admin/adapters/acme/a/route", {"version": 999}),
    "route_negative": ("PUT", "/admin/adapters/acme/a/route", {"version": -1}),
    "route_percent": ("PUT", "/admin/adapters/acme/a/route", {"version": 1, "canary": {"version": 1, "percent": 1e9}}),
    "route_text": ("PUT", "/admin/adapters/acme/a/route", {"version": "1"}),
    "alias_to_itself": ("PUT", "/admin/aliases/loop", {"target": "loop"}),
    "alias_of_an_id": ("PUT", "/admin/aliases/acme/a", {"target": "acme/b"}),
    "alias_of_nothing": ("PUT", "/admin/aliases/x", {"target": "no/such"}),
    "alias_number": ("PUT", "/admin/aliases/x", {"target": 5}),
    "engine_nothing": ("PUT", "/admin/engine", {}),
    "engine_negative": ("PUT", "/admin/engine", {"max_loras": -1}),
    "engine_zero_memory": ("PUT", "/admin/engine", {"adapter_host_memory": 0}),
    "engine_text": ("PUT", "/admin/engine", {"max_num_seqs": "all"}),
    "list_limit": ("GET", "/admin/adapters?limit=99999999999999999999", None),
    "list_state": ("GET", "/admin/adapters?state=%00", None),
    "list_limit_negative": ("GET", "/admin/adapters?limit=-1", None),
    "vllm_nothing": ("POST", "/v1/load_lora_adapter", {}),
    "vllm_path": ("POST", "/v1/load_lora_adapter", {"lora_name": "x/y", "lora_path": "/etc"}),
    "vllm_unload_unknown": ("POST", "/v1/unload_lora_adapter", {"lora_name": "no/such"}),
    "delete_version_text": ("DELETE", "/admin/adapters/acme/a?version=one", None),
    "delete_version_zero": ("DELETE", "/admin/adapters/acme/a?version=0", None),
    "delete_version_huge": ("DELETE", "/admin/adapters/acme/a?version=" + "9" * 5000, None),
    "delete_unknown": ("DELETE", "/admin/adapters/no/such", None),
    "roll_back_first": ("POST", "/admin/adapters/acme/a/rollback", {}),
    "pin_unknown": ("POST", "/admin/adapters/no/such/pin", {}),
    "upload_json": ("PUT", "/admin/adapters/x/y", {"a": 1}),
}


@pytest.mark.parametrize("name", BODIES)
def test_admin_call_that_makes_no_sense_is_refused_and_changes_nothing(house: House, name: str) -> None:
    before = house.services.catalog.snapshot
    method, path, body = BODIES[name]
    reply = as_admin(house, method, path, body)
    assert_refused(house, reply, (400, 404, 409, 413, 415, 422))
    after = house.services.catalog.snapshot
    assert (after.entries, after.aliases) == (before.entries, before.aliases)


def test_admin_body_over_the_limit_is_413(house: House) -> None:
    reply = call(house, "POST", "/admin/adapters", b" " * (house.settings.max_body_size + 1), dict(ADMIN))
    assert_refused(house, reply, 413)
