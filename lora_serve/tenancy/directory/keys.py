"""API keys: 256 random bits that are shown once, found by the part in front of them, known here by SHA-256 only."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string

from lora_serve.core.tenant import ApiKey

WRONG = "The API key is not valid."
REVOKED = "The API key was revoked."
EXPIRED = "The API key has expired."
ID_LENGTH = 12
IN_TEXT = re.compile(rf"\bls-([A-Za-z0-9_]{{{ID_LENGTH}}})-[A-Za-z0-9_-]{{20,}}")  # a secret, whole or nearly
_ALPHABET = string.ascii_lowercase + string.digits
_SECRET = re.compile(rf"ls-([a-z0-9]{{{ID_LENGTH}}})-[A-Za-z0-9_-]{{43}}\Z")
_NOBODY = hashlib.sha256(b"").hexdigest()  # what is compared where there is no key: it is no secret's


def new_secret() -> tuple[str, str]:
    """A key's id, and the whole secret `ls-<id>-<43 base64url characters>`."""
    key_id = "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))
    return key_id, f"ls-{key_id}-{secrets.token_urlsafe(32)}"


def digest_of(secret: str) -> str:
    """SHA-256, hex. The secret has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def id_in(secret: str) -> str | None:
    """The id in a secret; None if the text has not the form of a secret."""
    match = _SECRET.match(secret)
    return match[1] if match else None


def without_secrets(text: str) -> str:
    """The text with the ids of its secrets in their place."""
    return IN_TEXT.sub(r"ls-\1-***", text)


def opens(key: ApiKey | None, secret: str) -> bool:
    """True if the secret is this key's. Takes the same time if there is no key."""
    is_equal = hmac.compare_digest(digest_of(secret), _NOBODY if key is None else key.digest)
    return is_equal and key is not None
