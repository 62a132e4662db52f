"""The HTTP side: keys, browsers, limits of requests and connections, TLS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lora_serve.core.setting_texts import Origin, check_key, check_root_path, parse_name, parse_origin
from lora_serve.core.setting_types import YEAR, Bytes, Origins, Texts, setting
from lora_serve.core.tenant import Role


def _check_admin_key(value: str) -> str:
    if value != value.strip():
        raise ValueError("expected a key that neither begins nor ends with a space")
    return value


def _check_hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        if parse_name(text) is None:
            raise ValueError(f"expected a name or an address such as models.example.org, without a port: {text!r}")
    return value


def _check_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        if parse_origin(text) is None:
            raise ValueError(f"expected an origin such as https://app.example.org, without a path: {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """The keys that the settings name, and who needs one."""

    auth: Literal["auto", "on", "off"] = setting("auto", "tenant keys for inference; auto: off on loopback")
    admin_key: Annotated[str, Field(min_length=8, max_length=512), AfterValidator(_check_admin_key)] | None = setting(
        None, "bearer key of the admin API; default: made at first start, kept in the store", repr=False
    )
    api_key: Annotated[Texts, AfterValidator(lambda keys: tuple(map(check_key, keys)))] = setting(
        (),
        "bearer key with which any client may use all models and adapters, as vLLM's; keys of tenants are "
        "taken beside it; repeatable",
        repr=False,
    )

    def check_keys_together(self) -> None:
        """Raises ValueError."""
        if self.api_key and self.auth == "off":
            raise ValueError(
                "--api-key (or VLLM_API_KEY): is asked for by nobody with --auth off; leave one of them out"
            )

    @property
    def auth_mode(self) -> str:
        """`auth`; with a key for clients `auto` asks for it on loopback too."""
        return "on" if self.api_key and self.auth == "auto" else self.auth


@dataclass(frozen=True, kw_only=True)
class TenantSources:
    """Sources that tenants may name."""

    tenant_source: Texts = setting(
        (), "source (hf, https, s3, ...) from which tenants' own admins may register; repeatable"
    )


@dataclass(frozen=True, kw_only=True)
class AccessLimits:
    """Rights and limits of callers."""

    allow_control_tokens: bool = setting(
        False, "a control token's text in a message (a turn's end, ...) is that token; default: only text"
    )
    wrong_keys_per_minute: int = setting(
        20, "wrong keys from one address in a minute; more are refused with 429; 0: any number", ge=0, le=10**6
    )
    admin_acts_per_minute: int = setting(
        1200, "changes by one admin key in a minute, then 429; 0: any number", ge=0, le=10**6
    )
    tenant_acts_per_minute: int = setting(
        300, "changes by one key of a tenant's own admin in a minute, then 429; 0: any number", ge=0, le=10**6
    )
    max_body_size: Bytes = setting(16 * 2**20, "bytes of a request body at most (uploads: --max-upload-size)", ge=1024)

    def acts_of(self, role: Role) -> int:
        """Changes in a minute by one key of this role."""
        return self.admin_acts_per_minute if role is Role.ADMIN else self.tenant_acts_per_minute


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    """The size of an uploaded adapter."""

    max_upload_size: Bytes = setting(4 * 2**30, "bytes of an uploaded adapter at most", ge=1024)


class AccessSettings(UploadLimits, AccessLimits, TenantSources, KeySettings):
    """Keys, who needs one, and the size of bodies."""


@dataclass(frozen=True, kw_only=True)
class BrowserSettings:
    """The console, web pages that may use the server, and the names it goes by."""

    ui: bool | None = setting(None, "the console, a page for browsers at /ui; default: only on loopback")
    root_path: Annotated[str, AfterValidator(check_root_path)] = setting(
        "",
        "prefix (/llm) of the paths that a proxy leaves in place; requests without it are served too",
    )
    allowed_hosts: Annotated[Texts, AfterValidator(_check_hosts)] = setting(
        (), "names without a port under which a server that asks for no key may be called, beside its own; repeatable"
    )
    allowed_origins: Annotated[Origins, AfterValidator(_check_origins)] = setting(
        (), "origins (https://app.example.org) of other sites' pages that may use the server; repeatable"
    )

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Other names of a server that asks for no key."""
        return frozenset(name for text in self.allowed_hosts if (name := parse_name(text)))

    @cached_property
    def origins(self) -> frozenset[Origin]:
        """Those whose pages may use the server."""
        return frozenset(origin for text in self.allowed_origins if (origin := parse_origin(text)))


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The most that one inference request may ask for."""

    max_n: int = setting(16, "`n` of a request at most: answers to one prompt", ge=1, le=1024)
    max_prompts: int = setting(64, "prompts of a request at most", ge=1, le=4096)
    max_logprobs: int = setting(20, "`logprobs` of a request at most; -1: any number", ge=-1, le=1000)
    max_stop: int = setting(16, "stop strings of a request at most", ge=1, le=1024)
    max_stop_length: int = setting(1024, "characters of a stop string at most", ge=1, le=2**20)
    max_stop_token_ids: int = setting(256, "`stop_token_ids` of a request at most", ge=1, le=2**16)
    max_logit_bias: int = setting(300, "entries of `logit_bias` of a request at most", ge=1, le=2**16)


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Encryption of the HTTP side, under vLLM's names."""

    ssl_certfile: Path | None = setting(
        None, "PEM file with the certificate and its chain: HTTPS in place of HTTP; SIGHUP reads it anew"
    )
    ssl_keyfile: Path | None = setting(None, "PEM file with the certificate's private key; default: in --ssl-certfile")
    ssl_ca_certs: Path | None = setting(None, "PEM file of the authorities that sign clients' certificates")
    ssl_cert_reqs: int = setting(
        0, "certificates of clients: 0 not asked for, 1 checked if sent, 2 required", ge=0, le=2
    )

    def check_tls_together(self) -> None:
        """Raises ValueError."""
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            flag = "--ssl-keyfile" if self.ssl_keyfile else "--ssl-ca-certs" if self.ssl_ca_certs else "--ssl-cert-reqs"
            raise ValueError(f"--ssl-certfile: is required where another such flag is given ({flag})")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-ca-certs: is required with --ssl-cert-reqs 1 or 2")


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Connections of clients: how many, and for how long."""

    max_connections: int = setting(
        4096, "open connections at most; beyond it the oldest idle one makes room, or 503", ge=16, le=2**20
    )
    max_header_size: Bytes = setting(8190, "bytes of the request line, and of one header, at most", ge=1024, le=2**20)
    keep_alive_timeout: float = setting(
        75.0, "seconds after which a connection without a whole request head is closed", gt=0, le=YEAR
    )
    body_timeout: float = setting(
        120.0, "seconds that a request's body may take (an upload: each 4 KiB of it), then 408", gt=0, le=YEAR
    )
    write_timeout: float = setting(
        60.0, "seconds after which an answer that its reader takes nothing of is broken off", gt=0, le=YEAR
    )


@dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """Limits of one request's schema, regex or grammar, and of the checked ones that are remembered."""

    max_grammar_size: Bytes = setting(
        2**17, "bytes of a request's JSON schema, choices or structural tag at most", ge=256, le=2**24
    )
    max_regex_size: Bytes = setting(
        2**14, "bytes of a request's regex at most, and half those of its Lark or GBNF grammar", ge=256, le=2**20
    )
    max_grammar_symbols: int = setting(
        500_000, "symbols of a request's grammar, once compiled, at most", ge=1000, le=10**8
    )
    max_grammar_items: int = setting(
        50_000, "states that the parser of a grammar may be in at one token at most", ge=1000, le=10**7
    )
    max_lexer_states: int = setting(
        100_000, "states of a grammar's regexes at most; each takes some 430 bytes", ge=1000, le=10**7
    )
    max_lexer_work: int = setting(
        1_000_000, "steps for compiling a grammar's regexes at most; 50 million a second", ge=1000, le=10**9
    )
    grammar_threads: int = setting(2, "threads that check schemas and grammars", ge=1, le=64)
    grammar_cache: Bytes = setting(2**25, "bytes of checked schemas and grammars that are remembered")
