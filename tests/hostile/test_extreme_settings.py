"""Every setting with values that nobody means: refused in words that name it, or of a kind that works.

Cheap: the settings are resolved and handed to all that looks at them before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lora_serve.adapters.sources.table import build_sources
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig, ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.flags import flag_name
from lora_serve.core.settings import Settings, resolve_settings
from lora_serve.logs.pipeline import redaction_for
from lora_serve.server.sockets.listener import ServerTls, bound_socket
from tests.tiers import by_tier

T = TypeVar("T")
LONG = "x" * 10_000
TEXTS = (
    "0", "-1", "1", "0.5", "-0.5", "1e-320", "1e308", "1e309", "nan", "inf", "-inf", str(10**20), str(-(10**20)),
    "9" * 5000, "9" * 400 + "GiB", "1.5GiB", "0x10", "1_000", "\u0663", "", " ", "\t", "x", LONG, "[" * 4000,
    "{" * 100, "null", "true", "[]", "{}", '[""]', "[1]", '["a=1"]', "a=1", "a=1e308", "a=1e-320", "a=/", "=", ",",
    "a,b", "*", "a:b", "a b", "a\nb", "a\x00b", "a\x1bb", "\x7f", "\u202e", "\ud800", "\udcff", "../..", "/",
    "/dev/zero", "/proc/self/mem", "~", "${HOME}", "http://", "http://[", "http://a:99999999", "http://a:b@c d/",
    "redis://", "redis://[", "redis://a:x/", "redis://a/x", "file:///etc", "x" * 300, "x/" * 2000, "..", ".", "a..b",
    "\xe9", "::1", "[::1]", "999.1.1.1", "a" * 64 + ".b",
)  # fmt: skip
FROM_OUTSIDE = ("0", "-1", "10" * 20, "nan", "inf", LONG, "[" * 4000, "[1]", '[""]', "a\x1bb", "\udcff", ",", " ", "*")
VALUES = (
    0, -1, 1, 10**20, -(10**20), 0.5, float("nan"), float("inf"), -0.0, True, False, None, [], {}, [[]], [None],
    {"a": 1}, b"x",
)  # fmt: skip
# Looking for what reads the schemes takes a while.
OF_SOURCES = {"adapter_root", "adapter_url", "redis_prefix", "redis_url", "tenant_source"}
NAMES = sorted(set(Settings.model_fields) - {"config"})


@pytest.fixture
def watched() -> None:
    """No server here, so no canaries."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative folders lead to an empty one."""
    monkeypatch.chdir(tmp_path)


def check(name: str, flags: dict[str, Any]) -> None:
    """Refused by name, or good for all that looks at the settings before the model does."""
    said = refusal(name, flags)
    assert said is None or flag_name(name) in said, said[:300]
    assert said is None or len(said) < 1000, said[:300]


def refusal(name: str, flags: dict[str, Any]) -> str | None:
    try:
        settings = resolve_settings(flags)
        for part in (ModelConfig, EngineConfig, AdapterConfig, ServerConfig):
            settings.part(part)
        redaction_for(settings)
        if name in OF_SOURCES:
            build_sources(settings.part(AdapterConfig))
        if settings.ssl_certfile is not None:
            ServerTls(settings)
    except ConfigError as error:
        return str(error)
    assert_sane(name, getattr(settings, name))
    return None


def assert_sane(name: str, value: Any) -> None:
    """No number that a machine word cannot hold, no text that a log, a path or a key could not."""
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, int | float) and not isinstance(item, bool):
            assert -(2**63) <= item < 2**63
        if isinstance(item, str | Path):
            text = str(item)
            assert len(text) <= 4096
            assert text or Settings.model_fields[name].default == ""
            assert text.isprintable()
            assert text.encode().decode() == text


def some(values: Sequence[T], name: str) -> Sequence[T]:
    """By day a part of them, another one for the next setting."""
    step = by_tier(5, 1)
    return values[NAMES.index(name) % step :: step]


@pytest.mark.search
@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_flag(name: str, model: Path) -> None:
    is_list = "tuple" in str(Settings.model_fields[name].annotation)
    for text in some(TEXTS, name):
        check(name, {"model": str(model), name: [text] if is_list else text})


@pytest.mark.search
@pytest.mark.parametrize("name", NAMES)
def test_text_of_the_environment(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in some(FROM_OUTSIDE, name):
        monkeypatch.setenv(f"LORA_SERVE_{name.upper()}", text)
        check(name, {} if name == "model" else {"model": str(model)})


@pytest.mark.search
@pytest.mark.parametrize("name", NAMES)
def test_value_of_a_file(name: str, model: Path) -> None:
    for value in some(VALUES, name):
        check(name, {"model": str(model)} | {name: value})


@pytest.mark.parametrize("name", NAMES)
def test_default_is_within_its_own_bounds(name: str, model: Path) -> None:
    default = Settings.model_fields[name].default
    if name != "model" and default not in (None, (), ""):
        assert refusal(name, {"model": str(model), name: default}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_loras", "99999999999999999999"),
        ("kv_cache_memory", "0"),
        ("max_body_size", "0"),
        ("redis_prefix", "*"),
        ("redis_prefix", "a{b}"),
        ("redis_prefix", "a b"),
        ("redis_prefix", "a\\"),
        ("served_model_name", "a:b"),
        ("served_model_name", "a,b"),
        ("served_model_name", "a b"),
        ("swap_space", "9" * 400),
        ("keep_alive_timeout", "inf"),
        ("write_timeout", "1e309"),
        ("usage_flush_seconds", "1e-320"),
        ("tenant_weight", "a=1e308"),
        ("store", ""),
        ("adapter_root", ""),
        ("adapter_url", "a\nb"),
        ("host", "a b"),
        ("model", "x" * 300),
        ("model", "org/a:b"),
        ("admin_key", " a key with spaces "),
        ("otlp_traces_endpoint", "http://"),
        ("redis_url", "http://x"),
    ],
)
def test_value_that_would_fail_later_is_refused_now(name: str, value: str, model: Path) -> None:
    """With the flag, the value and what is allowed."""
    said = refusal(name, {"model": str(model), name: value})
    assert said is not None
    assert said.startswith(flag_name(name) + ":")
    if name not in {"redis_url", "otlp_traces_endpoint", "admin_key"}:
        assert repr(value)[1:50] in said or value[:50] in said


@pytest.mark.parametrize("host", ["a" * 64 + ".b", "a..b", "256.1.1.1.", "[::1"])
def test_name_that_no_machine_has_is_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bound_socket(host, 0)
