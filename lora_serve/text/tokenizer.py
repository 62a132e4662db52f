"""The base model's tokenizer: text <-> token ids. It knows nothing of requests, adapters or HTTP.

`TextModel` calls the Rust tokenizer below transformers' wrapper. `encode` and `decode` of the Rust tokenizer change no
state, so several threads may call them at once; the wrapper sets truncation and padding on each call ("Already
borrowed"). Long texts are encoded as batches of one, since only a batch lets other threads run meanwhile (a second for
two megabytes).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as TokenizersAddedToken
from tokenizers import Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.hub import cached_file

from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidRequestError, ModelError, on_one_line
from lora_serve.text.control_tokens import ControlTokens, RenderedChat, without_added_tokens
from lora_serve.text.gguf_tokenizer import tokenizer_of
from lora_serve.text.template import ChatTemplate, template_text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKEN_CACHE = 65536  # remembered texts of single tokens
_FEW_TOKENS = 1000  # decoded in a fraction of a millisecond
_VIEW_CACHE = 256  # remembered views, see `with_added`
_PROMPTS_FILE = "config_sentence_transformers.json"
_LETTERS_FILE = "sentence_bert_config.json"


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """Token ids and their types: 0 for the first text, mostly 1 for the second; empty if the tokenizer has no types."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextPreparation:
    """A change of a text before it is tokenised for an embedding: `prompt` + text, in small letters if `lower`."""

    prompt: str = ""
    lower: bool = False

    def of(self, text: str) -> str:
        """The text in the form on which the model was trained."""
        prepared = self.prompt + text
        return prepared.lower() if self.lower else prepared


class TextModel:
    """A fast tokenizer with its chat template; immutable, safe in threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        backend: Tokenizer | None = None,
        max_token_length: int | None = None,
        preparation: TextPreparation | None = None,
        template: ChatTemplate | None = None,
        allow_control_tokens: bool = False,
    ) -> None:
        """`backend`: a Rust tokenizer in place of the wrapper's. `max_token_length`, `template`: if known already.

        `allow_control_tokens`: the text of a control token in a message becomes the token.
        """
        self.wrapper = tokenizer
        self.preparation = preparation or TextPreparation()
        self.template = template or ChatTemplate(tokenizer)
        self._allow_control_tokens = allow_control_tokens
        self._backend: Tokenizer = backend or tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.max_token_length = max_token_length or max(map(len, self._backend.get_vocab()), default=1)  # characters
        self._token_bytes = TokenBytes(self._backend, {number: token.content for number, token in added.items()})
        self.token_text: Callable[[int], str] = functools.lru_cache(_TOKEN_CACHE)(self._decode_one)
        self.with_template: Callable[[ChatTemplate], TextModel] = functools.lru_cache(_VIEW_CACHE)(
            lambda template: self._view(self._backend, self.max_token_length, template)
        )
        self.with_added: Callable[[tuple[AddedToken, ...]], TextModel] = functools.lru_cache(_VIEW_CACHE)(self._added)

    @classmethod
    def load(cls, model: str, allow_control_tokens: bool = False, chat_template: str | None = None) -> TextModel:
        """Load the tokenizer of a folder, hub id or GGUF file. `chat_template`: in place of its own, a file or a text.

        Raises ModelError if there is no tokenizer, or no fast one.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one: its pool of threads is for nothing
        try:
            folder, own = tokenizer_of(model)
            tokenizer = own or AutoTokenizer.from_pretrained(folder, trust_remote_code=False, use_fast=True)
        except Exception as error:  # transformers raises many kinds for a broken folder; it reads config.json too
            raise ModelError(f"The tokenizer of {model} cannot be loaded: {on_one_line(error)}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{model} has no fast tokenizer (tokenizer.json), which lora_serve needs.")
        if chat_template is not None:
            tokenizer.chat_template = template_text(chat_template)
        return cls(tokenizer, preparation=preparation_of(folder), allow_control_tokens=allow_control_tokens)

    def vocabulary(self) -> dict[str, int]:
        """Spelling -> id of every token, added tokens included."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def serialized(self) -> str:
        """The tokenizer as the text of a tokenizer.json, added tokens included."""
        return self._backend.to_str()

    def is_piece(self, token: str) -> bool:
        """True if the plain vocabulary, without the added tokens, holds this spelling."""
        return self._backend.model.token_to_id(token) is not None

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`, with the tokens that the model expects around it (such as BOS) if asked for."""
        return tuple(_encoded(self._backend, text, None, add_special_tokens).ids)

    def encode_chat(self, chat: RenderedChat, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a chat, in which control tokens are the template's alone. Raises InvalidRequestError."""
        if chat.places is None or self.control_tokens is None:
            return self.encode(chat.text, add_special_tokens)
        return self.control_tokens.encode(chat.text, chat.places, add_special_tokens)

    @functools.cached_property
    def control_tokens(self) -> ControlTokens | None:
        """The tokens that only the template may write; None if messages may write them too."""
        if self._allow_control_tokens or not (self.template.source or self.template.tools_source):
            return None
        listed = getattr(self.wrapper, "chat_control_tokens", None)
        templates = f"{self.template.source}\n{self.template.tools_source}"
        return ControlTokens(self._backend, templates, listed=listed, unknown=self.wrapper.unk_token)

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-text token, if it has one: some models' generation_config.json names another."""
        found = self.wrapper.eos_token_id
        return () if found is None else (int(found),)

    def encode_input(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        side: str | None = None,
    ) -> EncodedInput:
        """Encode one text, or two for a pair; longer ones are cut to `max_tokens` so that the special tokens stay.

        `side`: where they lose tokens; None: on the tokenizer's own.
        Raises InvalidRequestError if the special tokens alone are more than `max_tokens`.
        """
        encoding = _encoded(self._backend, text, pair, add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            encoding = _cut(self._backend, text, pair, add_special_tokens, max_tokens, side or self.truncation_side)
        has_types = "token_type_ids" in self.wrapper.model_input_names
        return EncodedInput(tuple(encoding.ids), tuple(encoding.type_ids) if has_types else ())

    def beginning(self, text: str, max_tokens: int) -> str:
        """The longest beginning of `text` that ends between two tokens and gives `max_tokens` at most by itself; the
        first character in any case.
        """
        while True:
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
            if len(encoding) <= max_tokens or len(text) <= 1:
                return text
            end = min(encoding.offsets[max_tokens - 1][1], encoding.offsets[max_tokens][0], len(text) - 1)
            text = text[: max(end, 1)]

    @property
    def truncation_side(self) -> str:
        """The side on which a text that is too long loses tokens: "right" or "left"."""
        return str(self.wrapper.truncation_side)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; unknown ids give no text."""
        if len(token_ids) <= _FEW_TOKENS:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)  # as in `_encoded`
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, such as `Ġthe`; None if there is no such token."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token, by the vocabulary's own spelling; None if there is no such token."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a UTF-8 character."""
        found = self._token_bytes.find(token_id)
        return self.token_text(token_id).encode() if found is None else found

    def _added(self, tokens: tuple[AddedToken, ...]) -> TextModel:
        if not tokens:
            return self
        own = self._backend.get_added_tokens_decoder()
        view = without_added_tokens(self._backend)
        view.add_tokens([token for _, token in sorted(own.items())])
        view.add_tokens([_for_tokenizers(token) for token in tokens])
        expected = {number: token.content for number, token in own.items()} | {t.id: t.content for t in tokens}
        found_ids = {number: token.content for number, token in view.get_added_tokens_decoder().items()}
        assert found_ids == expected, "the tokenizer gives added tokens other ids than their file"
        longest = max(self.max_token_length, *(len(token.content) for token in tokens))
        return self._view(view, longest, self.template)

    def _view(self, backend: Tokenizer, max_token_length: int, template: ChatTemplate) -> TextModel:
        allows = self._allow_control_tokens
        return TextModel(self.wrapper, backend, max_token_length, self.preparation, template, allows)

    def _decode_one(self, token_id: int) -> str:
        """Text of one token inside a text: decoded twice in a row, as some decoders strip the first token's space."""
        once = self.decode((token_id,), skip_special_tokens=False)
        twice = self.decode((token_id, token_id), skip_special_tokens=False)
        if "\ufffd" in once or len(twice) <= len(once):
            return once
        return twice[len(once) :]

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration in JSON's types, without any path of this machine."""
        described: dict[str, Any] = {"tokenizer_class": type(self.wrapper).__name__, "vocab_size": self.vocab_size}
        for name, token in self.wrapper.special_tokens_map.items():
            described[name] = str(token)
        for name in ("add_bos_token", "add_eos_token", "model_max_length", "padding_side", "truncation_side"):
            setting = getattr(self.wrapper, name, None)
            if isinstance(setting, str | bool | int):
                described[name] = setting
        described["chat_template"] = self.wrapper.chat_template
        return described


def _for_tokenizers(token: AddedToken) -> TokenizersAddedToken:
    return TokenizersAddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.is_special,
    )


def _encoded(tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool) -> Encoding:
    """Encode one text, or a pair, as a batch of one: `encode` would keep the GIL. Offsets, which are not read, are left
    out, as freeing them takes longer than making them.
    """
    given = text if pair is None else (text, pair)
    (encoding,) = tokenizer.encode_batch_fast([given], add_special_tokens=add_special_tokens)
    return encoding


def _cut(
    tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool, max_tokens: int, side: str
) -> Encoding:
    """Encode to at most `max_tokens`, special tokens included, as the tokenizer itself would truncate, but without the
    truncation settings, which all threads share. `side`: "right" or "left", where tokens are lost.

    Raises InvalidRequestError if the special tokens alone are more.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
    most = max_tokens - num_special
    if most < 0:
        message = f"`truncate_prompt_tokens` ({max_tokens}) leaves no room beside {num_special} special tokens."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    first = _encoded(tokenizer, text, None, add_special_tokens=False)
    second = None if pair is None else _encoded(tokenizer, pair, None, add_special_tokens=False)
    num_first, num_second = _longest_first(len(first), 0 if second is None else len(second), most)
    first.truncate(num_first, 0, side)
    if second is not None:
        second.truncate(num_second, 0, side)
    return tokenizer.post_process(first, second, add_special_tokens)


def _longest_first(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """The numbers of tokens that two texts keep: the longer one loses first (`longest_first` in `tokenizers`)."""
    if num_first + num_second <= most:
        return num_first, num_second
    short = min(num_first, num_second)
    if 2 * short >= most:
        half, odd = divmod(most, 2)
        return (half, half + odd) if num_first <= num_second else (half + odd, half)
    long = most - short
    return (short, long) if num_first <= num_second else (long, short)


class TokenBytes:
    """Finds a token's bytes from its spelling in the vocabulary, for tokenizers whose decoder has a known alphabet.

    Byte-level alphabet: GPT-2's (Radford et al. 2019), a printable character for each of the 256 bytes.
    Byte fallback: SentencePiece's tokens `<0x00>` .. `<0xFF>`.
    """

    def __init__(self, backend: Tokenizer, added: Mapping[int, str]) -> None:
        self._backend = backend
        self._added = added  # added tokens are spelled as they are
        state = {"type": ""} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        kinds = {part["type"] for part in (state, *state.get("decoders", ()))}
        letters: dict[int, str] = bytes_to_unicode() if "ByteLevel" in kinds else {}  # type: ignore[no-untyped-call]
        self._alphabet = {letter: byte for byte, letter in letters.items()}
        self._fallback = "ByteFallback" in kinds

    def find(self, token_id: int) -> bytes | None:
        """The bytes of a token, or None if the spelling does not tell them."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if self._fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return None


def preparation_of(model: str) -> TextPreparation:
    """The preparation that files of sentence-transformers ask for; without any, none. Raises ModelError."""
    settings = _read_settings(model, _PROMPTS_FILE)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is not None and (not isinstance(prompts, dict) or not isinstance(prompts.get(name), str)):
        raise ModelError(f"{_PROMPTS_FILE} of {model} names the prompt {name!r}, which it does not hold.")
    return TextPreparation(
        prompts[name] if name is not None else "", _read_settings(model, _LETTERS_FILE).get("do_lower_case") is True
    )


def _read_settings(model: str, name: str) -> dict[str, Any]:
    try:
        found = cached_file(
            model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        value = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} of {model} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} of {model} is no JSON object.")
    return value
