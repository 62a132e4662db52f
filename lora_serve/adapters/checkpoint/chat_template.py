"""The chat template that a trainer saved beside an adapter, and the file in which it is kept if it is not the base's.

Trainers save `chat_template.jinja`, or `chat_template` in tokenizer_config.json: one text, or a list of named ones. The
special tokens of that tokenizer_config.json go with it, as far as the templates use them by name. Nobody compiles a
template on this floor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.content import (
    CHAT_TEMPLATE_NAME,
    MAX_KEPT_TEMPLATE_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
)
from lora_serve.adapters.regular_file import open_regular
from lora_serve.core.errors import InvalidAdapterError, InvalidRequestError
from lora_serve.core.strict_json import parse_object

MAX_TEMPLATE_BYTES = 2**16  # of all templates of one adapter
MAX_TEMPLATES = 8
DEFAULT = "default"  # the name of a template that has none
_MAX_NAME = 64  # characters
_MAX_TOKEN = 256  # characters of a special token
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Jinja texts by name, and the texts of the special tokens that they use by name."""

    texts: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BaseTemplates:
    """The base model's templates, and the means to examine an adapter's."""

    own: ChatTemplates
    fault_in: Callable[[str], str | None]  # the reason why a Jinja text is no template; None: it is one
    faults_in_chats: Callable[[ChatTemplates], Mapping[str, str]] = lambda templates: {}  # see `trial_faults`
    is_token: Callable[[str], bool] = lambda text: True  # of the served tokenizer
    are_kept: bool = True  # False: adapters' templates are only compared


@dataclass(frozen=True, slots=True)
class FoundTemplate:
    """The outcome of a comparison."""

    differs: bool
    kept: ChatTemplates | None = None  # as a part of the adapter's content
    strange_tokens: Mapping[str, str] = field(default_factory=dict)  # of the templates; no tokens of the base's


def examine_template(folder: Path, base: BaseTemplates) -> FoundTemplate | None:
    """Compare as `compare_template` does, and keep a template that differs in the folder, which is our own."""
    found = compare_template(folder, base)
    if found is not None and found.kept is not None:
        (folder / CHAT_TEMPLATE_NAME).write_bytes(kept_bytes(found.kept))
    return found


def compare_template(folder: Path, base: BaseTemplates) -> FoundTemplate | None:
    """Compare the template of a trainer's folder with the base's; None if there is none.

    Raises InvalidAdapterError for one that is too large or no template, OSError.
    """
    try:
        found = find_templates(folder)
    except InvalidAdapterError:
        if base.are_kept:
            raise
        return FoundTemplate(differs=True)
    if found is None:
        return None
    if not differs(found, base.own):
        return FoundTemplate(differs=False)
    if not base.are_kept:
        return FoundTemplate(differs=True)
    _check(found, base)
    kept = ChatTemplates(found.texts, _used_tokens(found, base.own))
    return FoundTemplate(differs=True, kept=kept, strange_tokens=_strange_tokens(found, base))


def find_templates(folder: Path) -> ChatTemplates | None:
    """The templates of a trainer's folder; a chat_template.jinja comes before the other place, as in transformers.

    A tokenizer_config.json that cannot be read is passed over: it may be there for another reason. Raises
    InvalidAdapterError, OSError.
    """
    table = side_table(folder, TOKENIZER_CONFIG_NAME)
    texts = _texts_of(table.get("chat_template"))
    if (folder / TEMPLATE_NAME).is_file():
        texts = {DEFAULT: _jinja_file(folder / TEMPLATE_NAME)}
    return ChatTemplates(texts, tokens_of(table)) if texts else None


def differs(found: ChatTemplates, base: ChatTemplates) -> bool:
    """True unless the base has templates of the same texts, with the same special tokens. Line ends, and white space
    at the ends of lines, count for nothing.
    """
    if any(_normal(text) != _normal(base.texts.get(name, "")) for name, text in found.texts.items()):
        return True
    return bool(_used_tokens(found, base))


def kept_bytes(templates: ChatTemplates) -> bytes:
    """The file that is kept, in one spelling."""
    table = {"chat_templates": dict(templates.texts), "special_tokens": dict(templates.special_tokens)}
    return json.dumps(table, sort_keys=True).encode()


def read_kept(folder: Path) -> FoundTemplate | None:
    """The template that `examine_template` kept. Raises InvalidAdapterError, OSError."""
    path = folder / CHAT_TEMPLATE_NAME
    if not path.is_file():
        return None
    with open_regular(path) as file:
        table = parse_object(file.read(MAX_KEPT_TEMPLATE_BYTES), CHAT_TEMPLATE_NAME)
    texts, tokens = table.get("chat_templates"), table.get("special_tokens")
    if texts is None or tokens is None or not _are_texts(texts) or not _are_texts(tokens):
        raise InvalidAdapterError([f"{CHAT_TEMPLATE_NAME} must hold texts by name"])
    return FoundTemplate(True, ChatTemplates(texts, tokens))


def _check(found: ChatTemplates, base: BaseTemplates) -> None:
    if len(found.texts) > MAX_TEMPLATES or any(len(name) > _MAX_NAME for name in found.texts):
        raise InvalidAdapterError([f"it has more than {MAX_TEMPLATES} chat templates, or one with a very long name"])
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in found.texts.values()) > MAX_TEMPLATE_BYTES:
        raise InvalidAdapterError([f"its chat template is larger than {MAX_TEMPLATE_BYTES} bytes"])
    faults = {name: base.fault_in(text) for name, text in found.texts.items()}
    if not any(faults.values()):
        faults |= base.faults_in_chats(found)
    reasons = [
        f"its chat template{'' if name == DEFAULT else f' {name!r}'} cannot be used: {fault}"
        for name, fault in faults.items()
        if fault is not None
    ]
    if reasons:
        raise InvalidAdapterError(reasons)


def side_table(folder: Path, name: str) -> Mapping[str, Any]:
    """The JSON object of a trainer's file; empty if there is none that can be read. Raises OSError."""
    path = folder / name
    if not path.is_file():
        return {}
    with open_regular(path) as file:
        text = file.read(MAX_TOKENIZER_CONFIG_BYTES + 1)
    try:
        return parse_object(text, name) if 0 < len(text) <= MAX_TOKENIZER_CONFIG_BYTES else {}
    except (InvalidAdapterError, InvalidRequestError):
        return {}


def _jinja_file(path: Path) -> str:
    with open_regular(path) as file:
        content = file.read(MAX_TEMPLATE_BYTES + 1)
    if not content.strip():
        raise InvalidAdapterError([f"{TEMPLATE_NAME} is empty, or far too large"])
    if len(content) > MAX_TEMPLATE_BYTES:
        raise InvalidAdapterError([f"{TEMPLATE_NAME} is larger than {MAX_TEMPLATE_BYTES} bytes"])
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidAdapterError([f"{TEMPLATE_NAME} is no text in UTF-8"]) from None


def _texts_of(value: Any) -> dict[str, str]:
    """One text, {name: text}, or [{"name": ..., "template": ...}] -> texts by name; none of another form."""
    if isinstance(value, str):
        value = {DEFAULT: value}
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
        value = {item["name"]: item.get("template") for item in value}
    return {name: text for name, text in value.items() if text.strip()} if _are_texts(value) else {}


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)


def tokens_of(table: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json by name."""
    found = {name: table.get(name) for name in _TOKEN_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and len(text) <= _MAX_TOKEN}


def _used_tokens(found: ChatTemplates, base: ChatTemplates) -> dict[str, str]:
    """The special tokens that are not the base's and that the templates name."""
    return {
        name: text
        for name, text in found.special_tokens.items()
        if text != base.special_tokens.get(name) and any(name in template for template in found.texts.values())
    }


def _strange_tokens(found: ChatTemplates, base: BaseTemplates) -> dict[str, str]:
    """Special tokens in the templates, by name or as they are, that are no tokens of the base's."""
    texts = "\n".join(found.texts.values())
    return {
        name: text
        for name, text in found.special_tokens.items()
        if (name in texts or text in texts) and text and not base.is_token(text)
    }


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()
