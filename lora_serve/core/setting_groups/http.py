"""The HTTP side: keys, browsers, limits of requests and connections, TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from lora_serve.core.setting_texts import check_root_path
from lora_serve.core.setting_types import YEAR, Bytes, Origins, SettingsGroup, Texts
from lora_serve.core.web_origin import parse_name, parse_origin


class AccessSettings(SettingsGroup):
    """Keys, who needs one, and the size of bodies."""

    auth: Literal["auto", "on", "off"] = Field("auto", description="tenant keys for inference; auto: off on loopback")
    admin_key: str | None = Field(
        None,
        min_length=8,
        max_length=512,
        description="bearer key of the admin API; default: made at first start, kept in the store",
    )
    api_key: Texts = Field(
        (),
        description="bearer key with which any client may use all models and adapters, as vLLM's; keys of tenants are "
        "taken beside it; repeatable",
    )
    tenant_source: Texts = Field(
        (), description="source (hf, https, s3, ...) from which tenants' own admins may register; repeatable"
    )
    allow_control_tokens: bool = Field(
        False, description="a control token's text in a message (a turn's end, ...) is that token; default: only text"
    )
    wrong_keys_per_minute: int = Field(
        20,
        ge=0,
        le=10**6,
        description="wrong keys from one address in a minute; more are refused with 429; 0: any number",
    )
    admin_acts_per_minute: int = Field(
        1200, ge=0, le=10**6, description="changes by one admin key in a minute, then 429; 0: any number"
    )
    tenant_acts_per_minute: int = Field(
        300,
        ge=0,
        le=10**6,
        description="changes by one key of a tenant's own admin in a minute, then 429; 0: any number",
    )
    max_body_size: Bytes = Field(
        16 * 2**20, ge=1024, description="bytes of a request body at most (uploads: --max-upload-size)"
    )
    max_upload_size: Bytes = Field(4 * 2**30, ge=1024, description="bytes of an uploaded adapter at most")

    @field_validator("api_key")
    @classmethod
    def _check_api_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text.isascii() or " " in text for text in value):
            raise ValueError("expected ASCII characters without a space")
        return value

    @model_validator(mode="after")
    def _check_keys_together(self) -> Self:
        if self.api_key and self.auth == "off":
            raise ValueError(
                "--api-key (or VLLM_API_KEY): is asked for by nobody with --auth off; leave one of them out"
            )
        return self

    @property
    def auth_mode(self) -> str:
        """`auth`; with a key for clients `auto` asks for it on loopback too."""
        return "on" if self.api_key and self.auth == "auto" else self.auth

    @field_validator("admin_key")
    @classmethod
    def _check_admin_key(cls, value: str | None) -> str | None:
        if value is not None and value != value.strip():
            raise ValueError("expected a key that neither begins nor ends with a space")
        return value


class BrowserSettings(SettingsGroup):
    """The console, web pages that may use the server, and the names it goes by."""

    ui: bool | None = Field(None, description="the console, a page for browsers at /ui; default: only on loopback")
    root_path: Annotated[str, AfterValidator(check_root_path)] = Field(
        "",
        description="prefix (/llm) of the paths that a proxy leaves in place; requests without it are served too",
    )
    allowed_hosts: Texts = Field(
        (),
        description="names without a port under which a server that asks for no key may be called, beside its own; "
        "repeatable",
    )
    allowed_origins: Origins = Field(
        (), description="origins (https://app.example.org) of other sites' pages that may use the server; repeatable"
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if parse_name(text) is None:
                raise ValueError(f"expected a name or an address such as models.example.org, without a port: {text!r}")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if parse_origin(text) is None:
                raise ValueError(f"expected an origin such as https://app.example.org, without a path: {text!r}")
        return value


class RequestLimitSettings(SettingsGroup):
    """The most that one inference request may ask for."""

    max_n: int = Field(16, ge=1, le=1024, description="`n` of a request at most: answers to one prompt")
    max_prompts: int = Field(64, ge=1, le=4096, description="prompts of a request at most")
    max_logprobs: int = Field(20, ge=-1, le=1000, description="`logprobs` of a request at most; -1: any number")
    max_stop: int = Field(16, ge=1, le=1024, description="stop strings of a request at most")
    max_stop_length: int = Field(1024, ge=1, le=2**20, description="characters of a stop string at most")
    max_stop_token_ids: int = Field(256, ge=1, le=2**16, description="`stop_token_ids` of a request at most")
    max_logit_bias: int = Field(300, ge=1, le=2**16, description="entries of `logit_bias` of a request at most")


class TlsSettings(SettingsGroup):
    """Encryption of the HTTP side, under vLLM's names."""

    ssl_certfile: Path | None = Field(
        None, description="PEM file with the certificate and its chain: HTTPS in place of HTTP; SIGHUP reads it anew"
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file with the certificate's private key; default: in --ssl-certfile"
    )
    ssl_ca_certs: Path | None = Field(None, description="PEM file of the authorities that sign clients' certificates")
    ssl_cert_reqs: int = Field(
        0, ge=0, le=2, description="certificates of clients: 0 not asked for, 1 checked if sent, 2 required"
    )

    @model_validator(mode="after")
    def _check_tls_together(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            flag = "--ssl-keyfile" if self.ssl_keyfile else "--ssl-ca-certs" if self.ssl_ca_certs else "--ssl-cert-reqs"
            raise ValueError(f"--ssl-certfile: is required where another such flag is given ({flag})")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-ca-certs: is required with --ssl-cert-reqs 1 or 2")
        return self


class ConnectionSettings(SettingsGroup):
    """Connections of clients: how many, and for how long."""

    max_connections: int = Field(
        4096, ge=16, le=2**20, description="open connections at most; beyond it the oldest idle one makes room, or 503"
    )
    max_header_size: Bytes = Field(
        8190, ge=1024, le=2**20, description="bytes of the request line, and of one header, at most"
    )
    keep_alive_timeout: float = Field(
        75.0, gt=0, le=YEAR, description="seconds after which a connection without a whole request head is closed"
    )
    body_timeout: float = Field(
        120.0,
        gt=0,
        le=YEAR,
        description="seconds that a request's body may take (an upload: each 4 KiB of it), then 408",
    )
    write_timeout: float = Field(
        60.0, gt=0, le=YEAR, description="seconds after which an answer that its reader takes nothing of is broken off"
    )
