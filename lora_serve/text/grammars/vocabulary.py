"""The served tokenizer as `llguidance` has it: a trie of all tokens, one for each vocabulary.

A trie of 150 000 tokens takes a second or more to build, without letting other threads run, and 130 MB.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from lora_serve.core.adapter import AddedToken
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


MAX_VOCABULARIES = 16


@dataclass(frozen=True, slots=True)
class _SpelledTokens:
    """Tokens by their bytes, for a tokenizer that `llguidance` cannot read: `TokenizerWrapper` asks for these names."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    text: TextModel
    ordinary: dict[bytes, int]  # those that stand for text
    bos_token_id: None = None

    def __call__(self, text: bytes | str) -> list[int]:
        wanted = text if isinstance(text, bytes) else text.encode()
        found = self.text.encode(wanted.decode(errors="ignore"), add_special_tokens=False)
        if not self.text.special_ids.isdisjoint(found) or b"".join(self.tokens[i] for i in found) != wanted:
            return self._greedy(wanted)
        return list(found)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token each time, for a text that the tokenizer changes or takes for a control token."""
        found: list[int] = []
        while text:
            token = next((t for n in range(len(text), 0, -1) if (t := self.ordinary.get(text[:n])) is not None), None)
            if token is None:
                break
            found.append(token)
            text = text[len(self.tokens[token]) :]
        return found


class Vocabularies:
    """Builds each vocabulary once; several threads may ask."""

    def __init__(self, load: Callable[[], TextModel], vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size`: the width of the base model's logits."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._text: TextModel | None = None
        self._built: dict[tuple[AddedToken, ...], Future[LLTokenizer]] = {}

    def get(self, added: tuple[AddedToken, ...]) -> LLTokenizer:
        """The base's tokens and the `added` ones of an adapter; builds it, or waits for the thread that does."""
        with self._lock:
            future = self._built.get(added)
            is_mine = future is None
            if future is None:
                future = self._built[added] = Future()
                self._drop_oldest()
        if is_mine:
            try:
                future.set_result(self._build(added))
            except BaseException as error:
                with self._lock:
                    self._built.pop(added, None)
                future.set_exception(error)
        return future.result()

    def _drop_oldest(self) -> None:
        """Drops an adapter's vocabulary if there are too many; the base's stays."""
        if len(self._built) > MAX_VOCABULARIES:
            del self._built[next(added for added in self._built if added)]

    def _build(self, added: tuple[AddedToken, ...]) -> LLTokenizer:
        text = self._base().with_added(added) if added else self._base()
        size = max(self._vocab_size, *(number + 1 for number in text.vocabulary().values()))
        eos = list(self._eos_token_ids) or text.wrapper.eos_token_id
        try:
            return LLTokenizer(plain_tokenizer(text), n_vocab=size, eos_token=eos)
        except ValueError:
            return LLTokenizer(TokenizerWrapper(self._spelled(text, size)), n_vocab=size, eos_token=eos)

    def _base(self) -> TextModel:
        with self._lock:
            if self._text is None:
                self._text = self._load()
            return self._text

    def _spelled(self, text: TextModel, size: int) -> _SpelledTokens:
        tokens = [text.token_bytes(number) for number in range(size)]
        ordinary = {token: number for number, token in enumerate(tokens) if number not in text.special_ids and token}
        eos = next(iter(self._eos_token_ids), 0)
        return _SpelledTokens(tokens, sorted(text.special_ids), eos, text, ordinary)
