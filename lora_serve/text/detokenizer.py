"""Token ids -> text, one token at a time, as if the whole had been decoded at once.

The method is the prefix and read offset of Hugging Face's text-generation-inference: decode a short window that
begins at an earlier clean boundary, and show what it holds beyond what was shown already. A trailing U+FFFD may be
the first bytes of a character, so it is held back until the next tokens complete it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.text.tokenizer import TextModel

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 6  # prompt tokens decoded before the answer: some decoders strip the space of a text's first token
MAX_CHARACTER_BYTES = 4  # in UTF-8
MAX_PENDING = 8  # tokens held back at most: more than a character's bytes are simply not UTF-8


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(
        self, text_model: TextModel, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._text_model = text_model
        self._hidden = text_model.special_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._read = 0  # the window up to here is shown
        self._shown = ""  # the window's text that was shown
        self._is_open = False  # a token came
        tail = [number for number in prompt_token_ids[-4 * PROMPT_TAIL :] if number not in self._hidden]
        for length in range(PROMPT_TAIL, PROMPT_TAIL + MAX_CHARACTER_BYTES):
            self._begin_window(tail[-length:])
            if REPLACEMENT not in self._decode():  # else it may begin in the middle of a character
                break

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now (often all of it, sometimes nothing)."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        self._is_open = True
        text = self._decode()
        overdue = len(self._window) - self._read > MAX_PENDING
        certain = text.removesuffix(REPLACEMENT) if overdue else text.rstrip(REPLACEMENT)
        piece = self._beyond_shown(certain) if len(certain) >= len(self._shown) else ""
        if piece:
            self._shown = certain
        if certain == text and (piece or overdue):
            # Begin the window at the boundary before; tokens that decode to nothing are dropped.
            self._begin_window(self._window[self._read :] if piece else self._window[: self._read])
        elif overdue:
            self._begin_window(self._window[-MAX_CHARACTER_BYTES:])
        return piece

    def flush(self) -> str:
        """The sequence ended: return what was held back, incomplete characters as U+FFFD."""
        text = self._decode()
        piece = self._beyond_shown(text) if self._is_open and text != self._shown else ""
        self._begin_window(self._window)
        self._shown = text
        return piece

    def _beyond_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # Byte-fallback decoders turn a whole run of bytes into U+FFFD once one of them is wrong.
        return self._text_model.decode(self._window[self._read :], skip_special_tokens=False)

    def _begin_window(self, token_ids: list[int]) -> None:
        """All of `token_ids` is shown, but for a character whose bytes may still come."""
        self._window = token_ids
        self._read = len(token_ids)
        self._shown = self._decode().removesuffix(REPLACEMENT)

    def _decode(self) -> str:
        return self._text_model.decode(self._window, skip_special_tokens=False)
