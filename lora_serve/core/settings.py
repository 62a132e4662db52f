"""Settings: resolved once from flags, environment (LORA_SERVE_X) and YAML, then frozen and handed on in slices.

Names are vLLM's where it has one. `load_settings` is the only door; a wrong value is a ConfigError that names
the flag, the value and what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.config import AdapterConfig, BatchLimits, EngineConfig, ModelConfig, QueueLimits, ServerConfig
from lora_serve.core.errors import ConfigError, InvalidRequestError
from lora_serve.core.flags import FlagParser, flag_name
from lora_serve.core.setting_types import Bytes, Paths, Texts, Weights
from lora_serve.core.settings_file import read_settings_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SECRETS = ("admin_key", "redis_url")


class Settings(BaseSettings):
    """Every setting of `lora-serve serve`; field names are flag names with underscores."""

    model_config = SettingsConfigDict(
        env_prefix="LORA_SERVE_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = Field(description="folder or hub id of the base model")
    served_model_name: str | None = Field(
        None, description="name of the base model on the wire; default: the model's folder or hub id"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs; auto: cuda if present")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="weights; auto: the checkpoint's own where the device computes it natively, else float32"
    )
    task: Literal["auto", "generate", "embed", "classify"] = Field(
        "auto", description="what the model does; auto: as its config.json and sentence-transformers files say"
    )
    pooling: Literal["auto", "cls", "mean", "last"] = Field(
        "auto", description="which tokens make an embedding; auto: as the model's files say"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="quantise the base's linear weights at load; none: serve the checkpoint as it is"
    )
    max_model_len: int | None = Field(
        None, ge=8, description="tokens, prompt and answer together; default: the model's own limit"
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="rows in one step at most")
    max_num_batched_tokens: int = Field(
        512, ge=16, description="tokens in one step at most; longer prompts run in chunks"
    )
    batch_wait_ms: float = Field(
        0.0, ge=0, le=60_000, description="milliseconds that the first waiting request waits for others; 0: none"
    )
    preferred_batch_size: int | None = Field(
        None, ge=1, description="waiting requests that start a batch before --batch-wait-ms is over"
    )
    latency_target_ms: float | None = Field(
        None, gt=0, description="p95 of time to first token, milliseconds, for which batches are sized; default: none"
    )
    inter_token_target_ms: float | None = Field(
        None, gt=0, description="p95 of inter-token time, milliseconds, for which batches are sized; default: none"
    )
    prompt_stretch: float = Field(
        2.0, ge=0, description="prompts make a step with decode rows at most so many times longer, about; 0: any size"
    )
    max_queue: int = Field(1024, ge=1, description="waiting requests at most; more are refused with 503")
    max_queue_tokens: int | None = Field(None, ge=1, description="prompt tokens that wait at most; default: any number")
    max_tenant_queue: int | None = Field(
        None, ge=1, description="waiting requests of one tenant at most; more are refused with 429; default: any number"
    )
    max_tenant_queue_tokens: int | None = Field(
        None, ge=1, description="prompt tokens of one tenant that wait at most; default: any number"
    )
    max_loras: int = Field(16, ge=1, description="adapters resident on the device at most (slots)")
    max_lora_rank: int = Field(512, ge=1, le=1024, description="largest rank that may be registered")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="adapters kept in host memory at most; default: by bytes only"
    )
    adapter_memory: Bytes | None = Field(
        None, description="bytes of adapters on the device at most; default: by --max-loras only"
    )
    adapter_host_memory: Bytes = Field(2 * 2**30, description="bytes of adapters in host memory at most")
    adapter_disk_memory: Bytes | None = Field(
        None, description="bytes of adapters on the local disk at most; with --redis-url a cache, else what may be kept"
    )
    adapter_eviction: Literal["cost", "lru"] = Field(
        "cost", description="who leaves a full tier: cost weighs use, size and time to reload; lru the last use only"
    )
    adapter_tenant_floor: float = Field(
        0.5, ge=0, le=1, description="part of a tenant's equal share of a tier that other tenants cannot push out"
    )
    adapter_load_threads: int = Field(2, ge=1, le=64, description="adapters read at the same time")
    kv_cache_memory: Bytes | None = Field(
        None, description="bytes of the KV cache; default: chosen from the memory that is free"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    swap_space: Bytes | None = Field(
        None, description="bytes of host memory for KV blocks of preempted requests; default: 4GiB on cuda, else 0"
    )
    memory_limit: Bytes | None = Field(
        None, description="bytes of device memory for weights, KV, adapters and steps; default: what is free at start"
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse the KV blocks of equal beginnings of prompts, within a tenant"
    )
    share_base_prefixes: bool = Field(
        False, description="let tenants reuse one another's KV blocks of the base model alone: a prompt's timing tells"
    )
    store: Path = Field(Path("adapters_store"), description="folder of the catalog and of the adapters' weights")
    adapter_root: Paths = Field((), description="folder from which the admin may register by path; repeatable")
    lora_modules: Texts = Field((), description="NAME=SOURCE adapters to register at start; repeatable")
    adapter_url: Texts = Field(
        (), description="beginning of http(s) URLs from which the admin may register archives; repeatable"
    )
    redis_url: str | None = Field(
        None, description="redis://host:port/db of the registry that replicas share; default: one of this server's own"
    )
    redis_prefix: str = Field("lora_serve", min_length=1, description="beginning of every key in Redis")
    engine: Literal["thread"] = Field("thread", description="where the engine runs")
    policy: Literal["fcfs", "affinity", "fair", "deadline", "priority"] = Field(
        "fcfs", description="order of waiting requests"
    )
    max_wait_ms: float = Field(
        10_000, gt=0, description="milliseconds after which no policy lets anybody overtake a waiting request"
    )
    tenant_weight: Weights = Field(
        (), description="TENANT=NUMBER share of a tenant under --policy fair (others: 1); repeatable"
    )
    attention: Literal["auto", "native", "sdpa", "varlen"] = Field(
        "auto", description="paged attention; auto: the fastest that runs here"
    )
    fuse_layers: bool = Field(True, description="fused kernels (CPU, float32) for layers where they prove to be equal")
    lora_kernel: Literal["auto", "loop", "native", "triton"] = Field(
        "auto", description="LoRA delta; auto: the fastest that runs here"
    )
    cuda_graphs: bool = Field(True, description="on GPUs capture decode steps once and replay them")
    warmup: Literal["auto", "full", "off"] = Field("auto", description="work done before /ready answers 200")
    auth: Literal["auto", "on", "off"] = Field("auto", description="tenant keys for inference; auto: off on loopback")
    admin_key: str | None = Field(
        None, min_length=8, description="bearer key of the admin API; default: made at first start, kept in the store"
    )
    max_body_size: Bytes = Field(16 * 2**20, description="bytes of a request body at most (uploads: --max-upload-size)")
    max_upload_size: Bytes = Field(4 * 2**30, description="bytes of an uploaded adapter at most")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="seconds that running requests may take to end after SIGTERM"
    )
    seed: int = Field(0, description="seed of unseeded requests' sampling")
    log_format: Literal["console", "json"] = Field("console", description="form of the log on standard error")
    config: Path | None = Field(None, description="YAML file with any of these settings")

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
        )


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
    if model.is_dir():
        if not (model / "config.json").is_file():
            raise ConfigError(f"--model: {settings.model} holds no config.json, so it is not a model folder")
    elif model.exists() or not _HUB_ID.fullmatch(settings.model) or ("/" in settings.model and model.parent.is_dir()):
        raise ConfigError(f"--model: {settings.model} is neither a folder nor a hub id such as org/name")
    for root in settings.adapter_root:
        if not root.is_dir():
            raise ConfigError(f"--adapter-root: {root} is not a folder")
    for item in settings.lora_modules:
        path = item.partition("=")[2]
        if "://" not in path and not Path(path).is_dir():
            raise ConfigError(f"--lora-modules: {path} is not a folder (got {item!r})")


def describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line per wrong setting; `origins` says where a value that is not a flag's came from."""
    return "\n".join(_describe_one(item, origins) for item in error.errors(include_url=False))


def _describe_one(item: ErrorDetails, origins: Mapping[str, str]) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{flag_name(name)}: is required ({Settings.model_fields[name].description})"
    origin = f" {origins[name]}" if name in origins else ""
    got = "a value that is not shown" if name in _SECRETS else repr(item["input"])[:200]
    return f"{flag_name(name)}: {message} (got {got}{origin})"
