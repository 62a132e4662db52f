"""Certificates made for one test, by the package trustme."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    """PEM files in a folder, and who signed them."""

    authority: trustme.CA
    certificate: Path
    key: Path
    authority_file: Path
    both: Path  # key and certificate in one file

    def client_context(self) -> ssl.SSLContext:
        """Trusts this authority only."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        self.authority.configure_trust(context)
        return context


def make_certificate(folder: Path, *names: str, authority: trustme.CA | None = None) -> Certificate:
    """For the given hosts; of a new authority unless one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = authority or trustme.CA()
    issued = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
    made = Certificate(
        authority, folder / "server.pem", folder / "server.key", folder / "authority.pem", folder / "both.pem"
    )
    issued.cert_chain_pems[0].write_to_path(made.certificate)
    issued.private_key_pem.write_to_path(made.key)
    issued.private_key_and_cert_chain_pem.write_to_path(made.both)
    authority.cert_pem.write_to_path(made.authority_file)
    return made
