"""Where the server listens, and what it refuses to do there."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from unittest.mock import create_autospec

import pytest

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import load_settings
from lora_serve.server.sockets.listener import check_exposure, warn_of_exposure


def bound_to(address: str) -> socket.socket:
    listener = create_autospec(socket.socket, instance=True)
    listener.getsockname.return_value = (address, 8000)
    return listener


def warnings_of(config: ServerConfig, address: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_exposure(config, bound_to(address))
        warn_of_exposure(config, bound_to(address))
    return caplog.messages


def test_server_listens_on_loopback_unless_told_otherwise(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    settings = load_settings(["--model", str(model)])
    assert (settings.host, settings.auth) == ("127.0.0.1", "auto")


@pytest.mark.parametrize("address", ["0.0.0.0", "10.1.2.3", "::", "2001:db8::1"])
def test_a_name_that_turns_out_to_be_reachable_is_refused_unless_auth_off_is_spelled_out(
    server_config: ServerConfig, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(server_config, host="localhost")  # auto: off, as the name says loopback
    with pytest.raises(ConfigError, match=r"--host: localhost is .*--auth on, or --auth off"):
        check_exposure(config, bound_to(address))
    assert any("anybody" in line for line in warnings_of(replace(config, auth_mode="off"), address, caplog))
    assert not any("anybody" in line for line in warnings_of(replace(config, auth_mode="on"), address, caplog))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "server.example.org", "127.1", ""])
def test_auto_asks_for_keys_wherever_the_name_is_not_loopback(server_config: ServerConfig, host: str) -> None:
    check_exposure(replace(server_config, host=host), bound_to("10.1.2.3"))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
@pytest.mark.parametrize("auth", ["auto", "on", "off"])
def test_loopback_is_always_taken_without_a_word(
    server_config: ServerConfig, address: str, auth: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(replace(server_config, auth_mode=auth), address, caplog) == []


def test_keys_in_the_clear_on_a_network_are_warned_of(
    server_config: ServerConfig, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(server_config, host="0.0.0.0")
    assert any("not encrypted" in line for line in warnings_of(config, "0.0.0.0", caplog))
    encrypted = replace(
        config,
        ssl_certfile=tmp_path_factory.getbasetemp(),
    )
    assert warnings_of(encrypted, "0.0.0.0", caplog) == []
