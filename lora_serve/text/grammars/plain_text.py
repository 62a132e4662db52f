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

_MODEL = ',"model":'
_BLANK = {"String": " "}  # what a vocabulary writes as `▁`, and its decoder as a blank again
_AS_WRITTEN = {"lstrip": False, "rstrip": False, "normalized": False}


def plain_tokenizer(text: TextModel) -> str:
    """The text of a tokenizer.json whose control tokens have names that no text holds, at the same ids."""
    head, found, model = text.serialized().partition(_MODEL)  # the model is megabytes; quotes in texts are escaped
    assert found, "tokenizers write the model last"
    tokenizer = json.loads(head + "}")
    secret = secrets.token_hex(8)
    names: dict[str, str] = {}
    added = []
    for token in tokenizer["added_tokens"]:
        content = token["content"]
        if token["special"] or _is_bracketed(content):
            names[content] = f"<{secret}-{token['id']}>"
        elif text.token_text(token["id"]) != content:  # a decoder reads `▁▁` as blanks, and `ü` perhaps as no letter
            if text.is_piece(content):
                continue
            names[content] = f"<{secret}-{token['id']}>"
        is_named = content in names
        added.append(token | _AS_WRITTEN | {"content": names.get(content, content), "special": is_named})
    changed = tokenizer | {
        "added_tokens": added,
        "normalizer": _spelling(tokenizer["normalizer"]),
        "pre_tokenizer": _without_first_blank(tokenizer["pre_tokenizer"]),
        "post_processor": None,
    }
    held = {content: name for content, name in names.items() if text.is_piece(content)}
    model = model.removesuffix("}")
    return f"{_written(changed)[:-1]}{_MODEL}{_written(_renamed(json.loads(model), held)) if held else model}}}"


def _written(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_bracketed(content: str) -> bool:
    """True for added tokens that `llguidance` takes as control tokens even if they are not special."""
    return content.startswith("<") and content.endswith(">")


def _renamed(model: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The model with other names for control tokens that are part of the plain vocabulary."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return model | {"vocab": [(names.get(piece, piece), score) for piece, score in vocabulary]}
    changed = model | {"vocab": {names.get(piece, piece): number for piece, number in vocabulary.items()}}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        changed["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    return changed


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
