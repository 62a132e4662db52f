"""The tokenizer that `llguidance` gets: any text has a spelling in ordinary tokens, and is spelled letter by letter.

`llguidance` spells the text that a grammar forces with the tokenizer itself, and then refuses a token that is not that
text: a control token, or a token that stands for the text in another form.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from lora_serve.text.tokenizer import TextModel

_BLANK = {"String": " "}  # what a vocabulary writes as `▁`, and its decoder as a blank again
_AS_WRITTEN = {"lstrip": False, "rstrip": False, "normalized": False}


def plain_tokenizer(text: TextModel) -> str:
    """The text of a tokenizer.json whose control tokens have names that no text holds, at the same ids."""
    tokenizer = json.loads(text.serialized())
    model = tokenizer["model"]
    pieces = {piece for piece, _ in model["vocab"]} if isinstance(model["vocab"], list) else model["vocab"].keys()
    secret = secrets.token_hex(8)
    names: dict[str, str] = {}
    added = []
    for token in tokenizer["added_tokens"]:
        content = token["content"]
        if token["special"] or _is_bracketed(content):
            names[content] = f"<{secret}-{token['id']}>"
        elif text.token_text(token["id"]) != content:  # a decoder reads `▁▁` as blanks, and `ü` perhaps as no letter
            if content in pieces:
                continue
            names[content] = f"<{secret}-{token['id']}>"
        is_named = content in names
        added.append(token | _AS_WRITTEN | {"content": names.get(content, content), "special": is_named})
    _rename(model, names)
    return json.dumps(
        tokenizer
        | {
            "added_tokens": added,
            "normalizer": _spelling(tokenizer["normalizer"]),
            "pre_tokenizer": _without_first_blank(tokenizer["pre_tokenizer"]),
            "post_processor": None,
        },
        ensure_ascii=False,
    )


def _is_bracketed(content: str) -> bool:
    """True for added tokens that `llguidance` takes as control tokens even if they are not special."""
    return content.startswith("<") and content.endswith(">")


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Gives the control tokens that are part of the plain vocabulary their names there too."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [(names.get(piece, piece), score) for piece, score in vocabulary]
        return
    held = names.keys() & vocabulary.keys()
    if not held:
        return
    model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    if model.get("unk_token") in held:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if held.isdisjoint((*pair, "".join(pair)))]


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The parts of a normalizer that say how a text is spelled; without those that make another text of it."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        parts = [part for part in map(_spelling, normalizer["normalizers"]) if part is not None]
        return {"type": "Sequence", "normalizers": parts} if parts else None
    is_blank = normalizer["type"] == "Replace" and normalizer["pattern"] == _BLANK
    return normalizer if is_blank or normalizer["type"] in ("ByteLevel", "Prepend") else None


def _without_first_blank(splitter: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer that puts no blank before the text; `llguidance` sees to those of the kind Metaspace."""
    if splitter is None:
        return None
    if splitter["type"] == "Sequence":
        return splitter | {"pretokenizers": [_without_first_blank(part) for part in splitter["pretokenizers"]]}
    return splitter | {"add_prefix_space": False} if splitter["type"] == "ByteLevel" else splitter
