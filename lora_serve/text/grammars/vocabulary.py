"""The served tokenizer as `llguidance` has it: a trie of all tokens, one for each vocabulary.

A trie of 150 000 tokens takes a second or more to build, without letting other threads run, and 130 MB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from lora_serve.core.adapter import AddedToken
from lora_serve.text.grammars.plain_text import plain_tokenizer
from lora_serve.text.tokenizer import TextModel

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
                self._make_room()
        if is_mine:
            try:
                future.set_result(self._build(added))
            except BaseException as error:
                with self._lock:
                    self._built.pop(added, None)
                future.set_exception(error)
        return future.result()

    def _make_room(self) -> None:
        """Drops the oldest vocabulary of an adapter; the base's stays."""
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
