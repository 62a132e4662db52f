"""The exact bytes of a token, for tokenizers whose decoder has a known alphabet.

Byte-level alphabet: GPT-2's (Radford et al. 2019), a printable character for each of the 256 bytes.
Byte fallback: SentencePiece's tokens `<0x00>` .. `<0xFF>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(others))]
    return {chr(character): byte for character, byte in zip(characters, [*printable, *others], strict=True)}


class TokenBytes:
    """Finds a token's bytes from its spelling in the vocabulary."""

    def __init__(self, backend: Tokenizer, added: Mapping[int, str]) -> None:
        self._backend = backend
        self._added = added  # added tokens are spelled as they are
        kinds = _decoder_kinds(backend)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds

    def find(self, token_id: int) -> bytes | None:
        """The bytes of a token, or None if the spelling does not tell them."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if self._fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return None


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    """Type names of the decoder and of its parts."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}
