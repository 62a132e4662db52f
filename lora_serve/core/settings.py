"""Settings: resolved once from flags, environment (LORA_SERVE_X) and YAML, then frozen and handed on in slices.

Names are vLLM's where it has one. `load_settings` is the only door; a wrong value is a ConfigError that names
the flag, the value and what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.config import (
    AccountingConfig,
    AdapterConfig,
    AttemptLimits,
    BatchLimits,
    BrowserRules,
    ConnectionLimits,
    EngineConfig,
    ModelConfig,
    QueueLimits,
    RequestLimits,
    ServerConfig,
    TlsConfig,
)
from lora_serve.core.errors import ConfigError, InvalidRequestError
from lora_serve.core.flags import FlagParser, flag_name
from lora_serve.core.setting_groups.access import AccessSettings
from lora_serve.core.setting_groups.accounting import AccountingSettings
from lora_serve.core.setting_groups.adapter_tiers import AdapterTierSettings
from lora_serve.core.setting_groups.batching import BatchSettings
from lora_serve.core.setting_groups.browsers import BrowserSettings
from lora_serve.core.setting_groups.connections import ConnectionSettings
from lora_serve.core.setting_groups.engine import EngineSettings
from lora_serve.core.setting_groups.kv_cache import KVCacheSettings
from lora_serve.core.setting_groups.observability import ObservabilitySettings
from lora_serve.core.setting_groups.operation import OperationSettings
from lora_serve.core.setting_groups.registry import RegistrySettings
from lora_serve.core.setting_groups.request_limits import RequestLimitSettings
from lora_serve.core.setting_groups.served_model import ServedModelSettings
from lora_serve.core.setting_groups.tls import TlsSettings
from lora_serve.core.settings_file import read_settings_file
from lora_serve.core.web_origin import parse_name, parse_origin

_HUB_ID = re.compile(r"(?=.{1,200}\Z)[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_MAX_MESSAGE = 400  # characters of what is said of one value
_SECRETS = ("admin_key", "redis_url", "otlp_traces_endpoint")


class Settings(
    # The last base's fields come first in --help.
    OperationSettings,
    ObservabilitySettings,
    ConnectionSettings,
    TlsSettings,
    RequestLimitSettings,
    AccountingSettings,
    BrowserSettings,
    AccessSettings,
    EngineSettings,
    RegistrySettings,
    KVCacheSettings,
    AdapterTierSettings,
    BatchSettings,
    ServedModelSettings,
):
    """Every setting of `lora-serve serve`; field names are flag names with underscores."""

    @field_validator("lora_modules")
    @classmethod
    def _check_lora_modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            name, equals, path = item.partition("=")
            if not equals or not path:
                raise ValueError("expected NAME=PATH")
            try:
                check_adapter_id(name)
            except InvalidRequestError as error:
                raise ValueError(f"{item!r}: {error}") from None
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): each running row takes one token per step"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What `resolve_settings` hands over, then the environment; no .env, no secrets folder."""
        return init_settings, env_settings

    def model_slice(self) -> ModelConfig:
        return ModelConfig(
            self.model,
            self.device,
            self.dtype,
            self.max_model_len,
            self.attention,
            self.lora_kernel,
            self.seed,
            self.quantization,
            self.task,
            self.pooling,
            self.fuse_layers,
            self.cuda_graphs,
        )

    @property
    def base_name(self) -> str:
        """What the base model is called on the wire."""
        return self.served_model_name or self.model

    def engine_slice(self) -> EngineConfig:
        batch = BatchLimits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.batch_wait_ms / 1000,
            self.preferred_batch_size,
            None if self.latency_target_ms is None else self.latency_target_ms / 1000,
            None if self.inter_token_target_ms is None else self.inter_token_target_ms / 1000,
            self.prompt_stretch or None,
        )
        queue = QueueLimits(self.max_queue, self.max_queue_tokens, self.max_tenant_queue, self.max_tenant_queue_tokens)
        return EngineConfig(
            batch,
            queue,
            self.kv_cache_memory,
            self.block_size,
            self.enable_prefix_caching,
            self.policy,
            self.seed,
            self.max_wait_ms / 1000,
            self.tenant_weight,
            self.swap_space,
            self.share_base_prefixes,
            self.memory_limit,
        )

    def adapter_slice(self) -> AdapterConfig:
        return AdapterConfig(
            self.store,
            self.adapter_root,
            self.redis_url,
            self.max_loras,
            self.max_lora_rank,
            self.adapter_memory,
            self.adapter_host_memory,
            self.max_cpu_loras,
            self.max_upload_size,
            self.base_name,
            self.adapter_disk_memory,
            self.adapter_eviction,
            self.adapter_tenant_floor,
            self.adapter_load_threads,
            self.adapter_url,
            self.redis_prefix,
            self.tenant_source,
            self.unnamed_blob_days,
            self.adapter_load_timeout,
            self.registration_seconds,
        )

    def accounting_slice(self) -> AccountingConfig:
        return AccountingConfig(
            self.usage_flush_seconds,
            self.usage_bucket_seconds,
            self.usage_keep_days,
            self.quota_without_redis == "local",
        )

    def server_slice(self) -> ServerConfig:
        return ServerConfig(
            self.host,
            self.port,
            self.base_name,
            self.admin_key,
            self.auth,
            self.max_body_size,
            self.shutdown_timeout,
            self.log_format,
            self.warmup,
            self.tls_slice(),
            self.otlp_traces_endpoint,
            self.metrics_tenants,
            self.metrics_names,
            requests=RequestLimits(
                self.max_n,
                self.max_prompts,
                self.max_logprobs,
                self.max_stop,
                self.max_stop_length,
                self.max_stop_token_ids,
                self.max_logit_bias,
            ),
            connections=ConnectionLimits(
                self.max_connections,
                self.max_header_size,
                self.keep_alive_timeout,
                self.body_timeout,
                self.write_timeout,
            ),
            attempts=AttemptLimits(self.wrong_keys_per_minute, self.admin_acts_per_minute, self.tenant_acts_per_minute),
            browsers=BrowserRules(
                frozenset(name for text in self.allowed_hosts if (name := parse_name(text))),
                frozenset(origin for text in self.allowed_origins if (origin := parse_origin(text))),
            ),
        )

    def tls_slice(self) -> TlsConfig | None:
        if self.ssl_certfile is None:
            return None
        return TlsConfig(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)


def load_settings(arguments: list[str]) -> Settings:
    """Read flags (`arguments`, without the program's name), environment and `--config FILE.yaml`.

    Raises ConfigError with one line per wrong setting: the flag, the value, what is allowed.
    `--help` prints every flag and exits with 0, as argparse does.
    """
    return resolve_settings(settings_parser("lora-serve serve", "Start the server.").values(arguments))


def settings_parser(program: str, description: str) -> FlagParser:
    """A parser that knows a flag for every setting."""
    note = " Every flag is also an environment variable (LORA_SERVE_MAX_LORAS) and a key of --config's YAML file."
    return FlagParser(program, description + note, Settings.model_fields)


def resolve_settings(flags: dict[str, Any]) -> Settings:
    """Settings from flags over environment over the YAML file. Raises ConfigError."""
    in_environment = {name: f"LORA_SERVE_{name.upper()}" for name in Settings.model_fields}
    in_environment = {name: key for name, key in in_environment.items() if os.environ.get(key)}
    file = flags.get("config") or os.environ.get("LORA_SERVE_CONFIG")
    from_file = read_settings_file(Path(file), Settings.model_fields) if file else {}
    try:
        settings = Settings(**{name: value for name, value in from_file.items() if name not in in_environment} | flags)
    except ValidationError as error:
        origins = dict.fromkeys(from_file, f"in {file}") | {name: f"in {key}" for name, key in in_environment.items()}
        raise ConfigError(describe(error, {name: origins[name] for name in origins if name not in flags})) from None
    check_folders(settings)
    return settings


def check_folders(settings: Settings) -> None:
    """Refuse folders that are not there before anything heavy is imported. Raises ConfigError."""
    model = Path(settings.model)
    if _is_there(model.is_dir):
        if not _is_there((model / "config.json").is_file):
            raise ConfigError(f"--model: {_shown(settings.model)} holds no config.json, so it is not a model folder")
    elif (
        _is_there(model.exists)
        or not _HUB_ID.fullmatch(settings.model)
        or ("/" in settings.model and _is_there(model.parent.is_dir))
    ):
        raise ConfigError(f"--model: {_shown(settings.model)} is neither a folder nor a hub id such as org/name")
    for root in settings.adapter_root:
        if not _is_there(root.is_dir):
            raise ConfigError(f"--adapter-root: {_shown(root)} is not a folder")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(settings, name)
        if file is not None and not _is_there(file.is_file):
            raise ConfigError(f"{flag_name(name)}: {_shown(file)} is not a file")
    for item in settings.lora_modules:
        path = item.partition("=")[2]
        if "://" not in path and not _is_there(Path(path).is_dir):
            raise ConfigError(f"--lora-modules: {_shown(path)} is not a folder (got {_shown(item)})")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_there(asked: Callable[[], bool]) -> bool:
    """Also a name that no file can have is only one that is not there."""
    try:
        return asked()
    except (OSError, ValueError):
        return False


def describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line per wrong setting; `origins` says where a value that is not a flag's came from."""
    return "\n".join(_describe_one(item, origins) for item in error.errors(include_url=False))


def _describe_one(item: ErrorDetails, origins: Mapping[str, str]) -> str:
    message = item["msg"].removeprefix("Value error, ")
    message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{flag_name(name)}: is required ({Settings.model_fields[name].description})"
    origin = f" {origins[name]}" if name in origins else ""
    got = "a value that is not shown" if name in _SECRETS else repr(item["input"])[:200]
    return f"{flag_name(name)}: {message} (got {got}{origin})"
