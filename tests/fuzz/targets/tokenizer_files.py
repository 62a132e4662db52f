"""The files of a trainer's tokenizer, beside an adapter: added tokens, and its chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from lora_serve.adapters.checkpoint.bound import BoundAdapter
from lora_serve.adapters.checkpoint.chat_template import (
    BaseTemplates,
    ChatTemplates,
    compare_template,
    examine_template,
    read_kept,
)
from lora_serve.adapters.checkpoint.content import (
    CHAT_TEMPLATE_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from lora_serve.adapters.checkpoint.own_tokens import (
    BaseTokens,
    added_tokens_text,
    find_added_tokens,
    parse_added_tokens,
    read_added_tokens,
    write_added_tokens,
)
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from tests.fuzz.files import empty_folder
from tests.fuzz.mutating import within, written

ERRORS = (InvalidAdapterError,)
BASE = BaseTokens({"<s>": 0, "a": 1, "b": 2})
SPEC = ModelSpec("m", "Llama", 9, 99, (), 1, {}, 5, "float32", "cpu", {}, {}, None, None, None, False)
GROWN = BoundAdapter({}, {}, {}, {}, vocab_size=9)
TEMPLATES = BaseTemplates(
    ChatTemplates({"default": "{{ messages }}"}), lambda text: "it is bad" if "%" in text else None
)
TOKENS = [
    {
        "id": 3,
        "content": "<x>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    },
    {"id": 4, "content": "<y>"},
]
NAMED = [{"name": "default", "template": "{{ bos_token }}"}, {"name": "rag", "template": "{{ messages }} "}]


def fuzz(data: bytes) -> None:
    """Four files of one text; the errors of three of them are looked for one by one."""
    with empty_folder() as folder:
        with contextlib.suppress(InvalidAdapterError):
            parse_added_tokens(data)
        (folder / CHAT_TEMPLATE_NAME).write_bytes(data)
        with contextlib.suppress(InvalidAdapterError):
            read_kept(folder)
        (folder / CHAT_TEMPLATE_NAME).unlink()
        (folder / TOKENIZER_CONFIG_NAME).write_bytes(data)
        with contextlib.suppress(InvalidAdapterError):
            found = examine_template(folder, TEMPLATES)
            assert found is None or found.kept is None or read_kept(folder) is not None
        (folder / TEMPLATE_NAME).write_bytes(data)
        with contextlib.suppress(InvalidAdapterError):
            compare_template(folder, TEMPLATES)
        (folder / TOKENIZER_NAME).write_bytes(data)
        added_tokens_text(folder / TOKENIZER_NAME)
        tokens = find_added_tokens(folder, GROWN, SPEC, BASE)
        write_added_tokens(folder, tokens)
        assert read_added_tokens(folder) == tokens


def seeds() -> Iterator[bytes]:
    yield written({"version": "1.0", "added_tokens": TOKENS, "model": {"type": "BPE", "vocab": {"a": 1}, "merges": []}})
    yield written({"added_tokens": []})
    yield written({"added_tokens": TOKENS[:1], "chat_template": "{{ bos_token }}", "bos_token": {"content": "<x>"}})
    yield written({"chat_template": NAMED, "bos_token": "<x>", "eos_token": None})
    yield written(
        {"chat_template": {"default": "a", "tool_use": "b"}, "chat_templates": {"default": "a"}, "special_tokens": {}}
    )
    yield b"{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    yield b"{" * 1000
    yield b'{"added_tokens": ' + b"[" * 5000
    yield b'{"added_tokens": [{"id": 1, "id": 2}]}'
    yield json.dumps({"added_tokens": TOKENS}, indent=2).encode("utf-16")


mutate = within(
    json.loads,
    written,
    (
        "added_tokens",
        "id",
        "content",
        "special",
        "lstrip",
        "chat_template",
        "name",
        "template",
        "default",
        "bos_token",
        "eos_token",
        "chat_templates",
        "special_tokens",
        "{{ bos_token }}",
        "<x>",
    ),
)
