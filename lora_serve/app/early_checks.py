"""Checks of a start that need no model: mistakes are reported at once, before torch is imported."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import jinja2

from lora_serve.adapters.checkpoint.content import MAX_CONFIG_BYTES
from lora_serve.adapters.checkpoint.peft_config import parse_config
from lora_serve.adapters.sources.table import build_sources
from lora_serve.adapters.stores.files import lock_store
from lora_serve.core.config import AdapterConfig, ModelConfig, ServerConfig
from lora_serve.core.errors import ConfigError, InvalidAdapterError, how_to_install
from lora_serve.core.gguf_file import gguf_of, read_gguf
from lora_serve.core.setting_groups.overflow import OverflowConfig, is_address_of
from lora_serve.core.setting_texts import template_in
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.cluster import check_installed
from lora_serve.model.native import compiler
from lora_serve.server.sockets.listener import ServerTls, bound_socket, check_exposure
from lora_serve.tenancy.admin_key import check_key_file


def check_start(settings: Settings) -> None:
    """Tries the port, the store's lock and the files, and lets go of them: `launch` takes them in earnest later.

    Raises ConfigError and ModelError.
    """
    _check_extras(settings)
    _check_neighbours(settings)
    config = settings.part(ServerConfig)
    with bound_socket(settings.host, settings.port) as listener:
        check_exposure(config, listener)
    if config.ssl_certfile is not None:
        ServerTls(config)
    lock_store(settings.store).close()
    if settings.admin_key is None:
        check_key_file(settings.store)
    build_sources(settings.part(AdapterConfig))
    compiler.current()
    _check_model(settings)
    _check_template(settings)
    _check_modules(settings)


def _check_neighbours(settings: Settings) -> None:
    for _, url in settings.part(OverflowConfig).neighbours:
        if is_address_of(url, settings.host, settings.port):
            raise ConfigError(f"--overflow: {url} is this server itself: name another one")


def _check_model(settings: Settings) -> None:
    if (gguf := gguf_of(settings.model)) is not None:
        header = read_gguf(gguf)
        if type(known := header.facts.get(f"{header.architecture}.context_length")) is int and known > 0:
            settings.part(ModelConfig).length(known)
        return
    file = Path(settings.model) / "config.json"
    if not file.is_file():
        check_hub(settings.model)
        return
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {file} cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--model: {file} holds no object, so it is not a model's")
    text = content.get("text_config", content)
    known = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if type(known) is int and known > 0:  # else the model's class has the number, or says how it is called
        settings.part(ModelConfig).length(known)


def check_hub(model: str) -> None:
    """Sees at once that there is no way to the hub, whose library would try for a minute: a model that was fetched
    before is then loaded without. Raises ConfigError for another.
    """
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if Path(model).exists() or os.environ.get("HF_HUB_OFFLINE") or getproxies():
        return
    try:
        socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), 5.0).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if not isinstance(importlib.import_module("huggingface_hub").try_to_load_from_cache(model, "config.json"), str):
            words = f"{hub.hostname} cannot be reached ({error}), and the hub's model was not fetched before"
            raise ConfigError(
                f"--model {model}: there is no such folder, {words}: give a folder, or a network"
            ) from None


def _check_template(settings: Settings) -> None:
    """Reads the operator's template as jinja2 does; `ChatTemplate` reads it again, with transformers' own names."""
    given = settings.chat_template
    if given is None:
        return
    try:
        environment = jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
        environment.parse(template_in(given))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template: {given[:200]!r} cannot be read: {str(error)[:300]}") from None
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):
            raise ConfigError(f"--chat-template: line {error.lineno}: {error.message}") from None


def _check_modules(settings: Settings) -> None:
    for item in settings.lora_modules:
        name, _, source = item.partition("=")
        if name in (settings.base_name, *settings.served_model_name):
            raise ConfigError(f"--lora-modules: `{name}` is the base model's name; --served-model-name gives another")
        if "://" in source:
            continue
        file = Path(source) / "adapter_config.json"
        if not file.is_file():
            raise ConfigError(
                f"--lora-modules: {source} holds no adapter_config.json, so it is no adapter (got {item})"
            )
        _check_adapter_config(file, item, settings.max_lora_rank)


def _check_adapter_config(file: Path, item: str, max_rank: int) -> None:
    """What registration would refuse too, after the model's load; `task_type` is left to it, as the model decides."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--lora-modules {item}: {file} cannot be read: {error.strerror}") from None
    if len(text) > MAX_CONFIG_BYTES:
        return
    try:
        parse_config(text, max_rank)
    except InvalidAdapterError as error:
        if reasons := [reason for reason in error.reasons if not reason.startswith("task_type")]:
            raise ConfigError(f"--lora-modules {item}: {InvalidAdapterError(reasons)}") from None


def _check_extras(settings: Settings) -> None:
    """Packages that only some settings need."""
    if settings.engine == "ray":
        check_installed()
    if settings.redis_url is not None:
        if importlib.util.find_spec("redis") is None:
            raise ConfigError(f"--redis-url needs the package redis: {how_to_install('redis')}")
        connection = importlib.import_module("lora_serve.adapters.redis_connection")
        connection.connect(settings.redis_url, 1.0).close()  # never opened: only the URL is read
