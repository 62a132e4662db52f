"""Encryption of the HTTP side, under vLLM's names."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from lora_serve.core.setting_groups.group import SettingsGroup


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
