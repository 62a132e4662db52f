"""The pairs of --overflow-model-map, in all forms in which they may come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_serve.app.early_checks import check_start
from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_groups.overflow import ModelMap, OverflowConfig, is_address_of, parse_model_map
from lora_serve.core.settings import resolve_settings

MODEL = str(Path(__file__).parents[2] / "lora_serve" / "demo_data" / "model")


@pytest.mark.parametrize(
    "given",
    [
        "acme/a=x, acme/*=",
        ["acme/a=x", "acme/*="],
        '["acme/a=x", "acme/*="]',
        '{"acme/a": "x", "acme/*": null}',
        {"acme/a": "x", "acme/*": None},
        (("acme/a", "x"), ("acme/*", "")),
    ],
)
def test_forms_of_a_map(given: Any) -> None:
    assert parse_model_map(given) == (("acme/a", "x"), ("acme/*", ""))


@pytest.mark.parametrize("text", ["acme/a: x\nbase: big\n", '{"acme/a": "x", "base": "big"}'])
def test_map_in_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(text)
    assert parse_model_map(str(file)) == (("acme/a", "x"), ("base", "big"))


def test_longest_pattern_wins_and_names_win_over_patterns() -> None:
    found = ModelMap((("*", "all-*"), ("acme/*", "*"), ("acme/a", "x"), ("acme/a@2", "two"), ("b", "b-{version}")))
    assert found.target("acme/a", 1) == "x"
    assert found.target("acme/a", 2) == "two"
    assert found.target("acme/b", 1) == "b"
    assert found.target("other", 1) == "all-other"
    assert found.targets == ("x", "two")


def test_version_that_the_name_does_not_mean_alone_has_to_be_named() -> None:
    found = ModelMap((("a", "x"), ("a@2", "two"), ("b", "b-{version}")))
    assert [found.target(*one, is_only=False) for one in (("a", 1), ("a", 2), ("b", 7))] == [None, "two", "b-7"]
    assert ModelMap().target("a", 1) == "a"
    assert ModelMap().target("a", 1, is_only=False) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overflow": "ftp://x"}, "--overflow: expected a URL such as"),
        ({"overflow": "http://somebody:secret@x"}, "--overflow: a URL must hold no key"),
        ({"overflow": "http://a,http://a/v1"}, "--overflow: two neighbours have one"),
        ({"overflow": "a/b=http://x"}, "--overflow: a neighbour's name"),
        ({"overflow_api_key": "k-of-the-neighbour"}, "--overflow: is required with --overflow-api-key"),
        (
            {"overflow": "http://x/?key=k-of-the-neighbour"},
            "--overflow: expected a URL .* without a query: 'http://x/'",
        ),
        ({"overflow_after_ms": "5"}, "--overflow: is required with --overflow-after-ms"),
        ({"overflow": "http://x", "overflow_api_key": "not ascii é"}, "--overflow-api-key: expected ASCII"),
        ({"overflow": "http://x", "overflow_model_map": "no.yaml"}, "no.yaml is no file"),
        ({"overflow": "http://x", "overflow_model_map": "a=*"}, "one `\\*` may stand in a name"),
        ({"overflow": "http://x", "overflow_model_map": '{"a": 7}'}, "are no two names"),
        ({"overflow": "http://x", "overflow_after_ms": "-1"}, "--overflow-after-ms"),
    ],
)
def test_wrong_settings_are_told_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_settings({"model": MODEL, **settings})
    assert not any(secret in str(caught.value) for secret in ("somebody:secret", "k-of-the-neighbour", "not ascii"))


def test_a_key_in_the_environment_alone_stops_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_OVERFLOW_API_KEY", "k-of-the-neighbour")
    assert resolve_settings({"model": MODEL}).overflow_api_key is None
    assert resolve_settings({"model": MODEL, "overflow": "http://x"}).overflow_api_key == "k-of-the-neighbour"
    monkeypatch.setenv("LORA_SERVE_OVERFLOW", "http://x")
    assert resolve_settings({"model": MODEL}).overflow_api_key == "k-of-the-neighbour"


def test_what_is_told_of_several_settings_names_the_variable_that_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_OVERFLOW_AFTER_MS", "5")
    with pytest.raises(ConfigError) as caught:
        resolve_settings({"model": MODEL})
    words = "--overflow: is required with --overflow-after-ms; --overflow-after-ms is in LORA_SERVE_OVERFLOW_AFTER_MS"
    assert str(caught.value) == words


def test_settings_become_one_slice_that_shows_no_key() -> None:
    given = {"overflow": "gpu=http://10.0.0.7:8000/v1/,https://b.example", "overflow_api_key": "a-secret-key"}
    config = resolve_settings({"model": MODEL, "overflow_after_ms": 250, **given}).part(OverflowConfig)
    assert config.neighbours == (("gpu", "http://10.0.0.7:8000"), ("b.example", "https://b.example"))
    assert (config.overflow_after_ms, config.overflow_timeout_ms, config.overflow_api_key) == (
        250,
        10_000,
        "a-secret-key",
    )
    assert "a-secret-key" not in repr(config)


@pytest.mark.parametrize(
    ("url", "host", "is_own"),
    [
        ("http://localhost:8000", "0.0.0.0", True),
        ("http://127.0.0.1:8000", "127.0.0.1", True),
        ("http://models.example:8000", "models.example", True),
        ("http://127.0.0.1:8001", "127.0.0.1", False),
        ("https://10.0.0.7", "0.0.0.0", False),
    ],
)
def test_own_address_is_known(url: str, host: str, is_own: bool) -> None:
    assert is_address_of(url, host, 8000) is is_own


def test_server_that_is_given_its_own_address_does_not_start() -> None:
    settings = resolve_settings({"model": MODEL, "port": 8123, "overflow": "http://localhost:8123/v1"})
    with pytest.raises(ConfigError, match="--overflow: http://localhost:8123 is this server itself"):
        check_start(settings)
