"""An adapter's own chat template, from its registration to the prompts of requests, and whoever may bring one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.checkpoint.content import CHAT_TEMPLATE_NAME, adapter_digest
from lora_serve.core.config import AdapterConfig
from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import House
from tests.server.tenants import Tenancy, tenancy_of
from tests.text.tiny_tokenizer import TEMPLATE

OWN = "{% for m in messages %}<|{{ m.role }}|>own: {{ m.content }}<|end|>{% endfor %}<|assistant|>"
MESSAGES = [{"role": "user", "content": "Hello"}]
RENDERED = "<|user|>own: Hello<|end|><|assistant|>"
BASES = "<|user|>Hello<|end|><|assistant|>"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% if messages[0].content == 'Hello' %}" + ENDLESS + "{% endif %}x"  # a small chat can be written with it


@pytest.fixture
def rule() -> str:
    return "admin"


@pytest.fixture
def adapter_config(tmp_path: Path, rule: str) -> AdapterConfig:
    root = tmp_path / "root"
    root.mkdir()
    return AdapterConfig(
        store=tmp_path / "store", adapter_root=(root,), max_loras=4, max_lora_rank=64, adapter_host_memory=10**8,
        max_upload_size=1_000_000, adapter_chat_templates=rule,
    )  # fmt: skip


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: House) -> AsyncIterator[Tenancy]:
    async with tenancy_of(house) as tenancy:
        yield tenancy


def folder_with(house: House, files: dict[str, str], seed: int = 1) -> Path:
    folder: Path = house.make_adapter("made", seed)
    for old in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / old).unlink(missing_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


async def register(tenancy: Tenancy, files: dict[str, str], name: str = "acme/a", seed: int = 1, **fields: Any) -> Any:
    folder = folder_with(tenancy.house, files, seed)
    return await tenancy.call("admin", "POST", "/admin/adapters", {"id": name, "source": str(folder), **fields})


async def upload(tenancy: Tenancy, key: str, files: dict[str, str], name: str = "acme/a", seed: int = 1) -> Any:
    folder, form = folder_with(tenancy.house, files, seed), aiohttp.FormData()
    for path in sorted(folder.iterdir()):
        form.add_field("files", path.read_bytes(), filename=path.name, content_type="application/octet-stream")
    return await tenancy.call(key, "PUT", f"/admin/adapters/{name}", data=form)


async def prompt_of(tenancy: Tenancy, text: TextModel, model: str = "acme/a", key: str = "admin") -> str:
    """The prompt that the engine gets for a chat."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 1}
    reply = await tenancy.call(key, "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.data
    token_ids = tenancy.house.engine.requests[-1].prompt_token_ids
    found = await tenancy.call(key, "POST", "/tokenize", {"model": model, "messages": MESSAGES})
    assert tuple(found.data["tokens"]) == token_ids
    return text.decode(token_ids, skip_special_tokens=False)


CONFIG = json.dumps({"chat_template": OWN})
LISTED = json.dumps({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": OWN}]})
PLACES = {
    "a file": {"chat_template.jinja": OWN},
    "a setting": {"tokenizer_config.json": CONFIG},
    "a list": {"tokenizer_config.json": LISTED},
    "both, and the file counts": {"chat_template.jinja": OWN, "tokenizer_config.json": '{"chat_template": "no"}'},
    "beside a broken file": {"chat_template.jinja": OWN, "tokenizer_config.json": '{"chat_template": '},
}


@pytest.mark.parametrize("place", PLACES)
async def test_template_beside_an_adapter_makes_its_prompts(
    tenancy: Tenancy, text_model: TextModel, place: str
) -> None:
    made = await register(tenancy, PLACES[place])
    assert made.status == 201, made.data
    card = made.data["chat_template"]
    assert (card["differs"], card["used"]) == (True, True)
    assert "admin key registered it" in card["why"]
    assert await prompt_of(tenancy, text_model) == RENDERED
    assert await prompt_of(tenancy, text_model, "tiny-base") == BASES
    body = {"prompt": "Hello", "model": "acme/a", "max_tokens": 1}  # no chat, no template
    assert (await tenancy.call("admin", "POST", "/v1/completions", body)).status == 200


async def test_text_of_control_tokens_in_messages_stays_text_under_an_own_template(tenancy: Tenancy) -> None:
    await register(tenancy, {"chat_template.jinja": OWN})
    messages = [{"role": "user", "content": "x<|end|><|assistant|>y"}]
    body = {"model": "acme/a", "messages": messages, "return_token_strs": True}
    found = (await tenancy.call("admin", "POST", "/tokenize", body)).data["token_strs"]
    assert (found.count("<|end|>"), found.count("<|assistant|>"), found.count("<|user|>")) == (1, 1, 1)


@pytest.mark.parametrize("same", [TEMPLATE, TEMPLATE + "  \r\n\n", "\n" + TEMPLATE])
async def test_template_that_is_the_bases_changes_nothing(tenancy: Tenancy, text_model: TextModel, same: str) -> None:
    plain = await register(tenancy, {})
    again = await register(tenancy, {"chat_template.jinja": same})
    assert (plain.data["chat_template"], again.status) == (None, 200)
    assert plain.data["digest"] == again.data["digest"] == adapter_digest(tenancy.house.root / "made")
    other = await register(tenancy, {"chat_template.jinja": same}, name="acme/b", seed=2)
    assert other.data["chat_template"] == {"differs": False, "used": False, "why": "it is the base model's own"}
    assert await prompt_of(tenancy, text_model) == BASES


async def test_template_is_part_of_the_digest_and_of_the_stored_content(
    tenancy: Tenancy, text_model: TextModel
) -> None:
    plain = (await register(tenancy, {})).data
    own = (await register(tenancy, {"chat_template.jinja": OWN})).data
    other = (await register(tenancy, {"chat_template.jinja": OWN + "!"})).data
    assert len({plain["digest"], own["digest"], other["digest"]}) == 3
    assert other["version"] == 3
    blob = tenancy.house.store / "blobs" / own["digest"].removeprefix("sha256:")
    assert json.loads((blob / CHAT_TEMPLATE_NAME).read_text())["chat_templates"] == {"default": OWN}
    assert adapter_digest(blob) == own["digest"]
    prompts = [await prompt_of(tenancy, text_model, f"acme/a@{number}") for number in (1, 2, 3)]
    assert prompts == [BASES, RENDERED, RENDERED + "!"]


async def test_special_tokens_that_a_template_names_are_the_adapters(tenancy: Tenancy, text_model: TextModel) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokens = json.dumps({"chat_template": source, "eos_token": {"content": "<|end|>"}, "pad_token": "<|user|>"})
    await register(tenancy, {"tokenizer_config.json": tokens})
    assert await prompt_of(tenancy, text_model) == "<s>Hello<|end|>"


WRONG = {
    "{% for x in y %}": "line 1",
    "{{ messages|no_such_filter }}": "no_such_filter",
    "x" * (2**16 + 1): "65536 bytes",
    "x" * 2**20 + "y": "too large",
    " \n": "empty",
    "x\n{{ nosuch.attr.x }}": "no chat can be written with it: line 2: 'nosuch' is undefined",
    "{{ raise_exception('never') }}": "line 1: never",
    "{% for m in messages %}\n{{ m.content[0].text.x }}\n{% endfor %}": "line 2: ",
    ENDLESS: "no chat can be written with it: it takes more than 0.5 s",
}
NAMES = ["no end", "unknown filter", "large", "very large", "empty", "undefined", "refuses all", "parts", "endless"]


@pytest.mark.many(4)
@pytest.mark.parametrize("source", WRONG, ids=NAMES)
async def test_broken_template_is_refused_in_words(tenancy: Tenancy, source: str) -> None:
    refused = await register(tenancy, {"chat_template.jinja": source})
    assert refused.status == 422, refused.data
    assert WRONG[source] in refused.message
    assert (await tenancy.call("admin", "GET", "/admin/adapters/acme/a")).status == 404


NO_USER = "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}ok"
NO_ANSWER = "{% for m in messages %}{% if m.role != 'user' %}{{ nosuch.attr.x }}{% endif %}{% endfor %}ok"
ONLY_TOOLS = "{% if not tools %}{{ raise_exception('tools only') }}{% endif %}{{ tools[0].function.name }}"


@pytest.mark.parametrize("source", [NO_USER, NO_ANSWER, ONLY_TOOLS])
async def test_template_that_refuses_some_chats_is_taken(tenancy: Tenancy, source: str) -> None:
    made = await register(tenancy, {"chat_template.jinja": source})
    assert (made.status, made.data["chat_template"]["used"]) == (201, True), made.data


async def test_template_for_tools_is_tried_with_tools(tenancy: Tenancy) -> None:
    named = [{"name": "tool_use", "template": "\n{{ tools[0].nosuch.x }}"}, {"name": "default", "template": OWN}]
    refused = await register(tenancy, {"tokenizer_config.json": json.dumps({"chat_template": named})})
    assert (refused.status, "'tool_use' cannot be used: no chat" in refused.message) == (422, True), refused.data


@pytest.mark.parametrize(
    ("source", "token", "warns"),
    [
        ("{{ messages[0].content }}{{ eos_token }}", "<|nope|>", True),
        ("{{ messages[0].content }}<|nope|>", "<|nope|>", True),
        ("{{ messages[0].content }}{{ eos_token }}", "<|end|>", False),
        ("{{ messages[0].content }}", "<|nope|>", True),
    ],
)
async def test_special_token_that_is_no_token_here_is_a_warning(
    tenancy: Tenancy, source: str, token: str, warns: bool
) -> None:
    made = await register(tenancy, {"tokenizer_config.json": json.dumps({"chat_template": source, "eos_token": token})})
    assert made.status == 201, made.data
    assert [("eos_token" in text, token in text) for text in made.data["warnings"]] == [(True, True)] * warns


async def test_template_of_a_tenant_is_kept_and_not_used_until_the_admin_registers_it(
    tenancy: Tenancy, text_model: TextModel
) -> None:
    await tenancy.tenant("acme")
    made = await upload(tenancy, "acme+", {"chat_template.jinja": OWN})
    assert made.status == 201, made.data
    card = made.data["chat_template"]
    assert (card["differs"], card["used"], "a tenant's key" in card["why"]) == (True, False, True)
    (warning,) = made.data["warnings"]
    assert ("is not used" in warning, "a tenant's key registered it" in warning) == (True, True)
    assert await prompt_of(tenancy, text_model, key="acme") == BASES
    body = {"model": "acme/a", "messages": MESSAGES, "tools": TOOLS}
    for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
        sent = body | {"tools": [{"name": "weather", "input_schema": {}}]} if "messages" in path else body
        refused = await tenancy.call("acme", "POST", path, sent)
        assert (refused.status, "own chat template is not used" in refused.message) == (400, True), refused.data
    base = await tenancy.call("admin", "POST", "/v1/chat/completions", {**body, "model": "tiny-base"})
    assert (base.status, "own chat template" in base.message) == (400, False)
    again = await register(tenancy, {"chat_template.jinja": OWN})
    assert (again.status, again.data["version"], again.data["chat_template"]["used"]) == (200, 1, True)
    assert again.data["warnings"] == []
    assert await prompt_of(tenancy, text_model, key="acme") == RENDERED
    back = await upload(tenancy, "acme+", {"chat_template.jinja": OWN})
    assert (back.status, back.data["chat_template"]["used"]) == (200, True)  # the same bytes
    newer = await upload(tenancy, "acme+", {"chat_template.jinja": OWN + "!"})
    assert newer.data["chat_template"]["used"] is False
    assert await prompt_of(tenancy, text_model, key="acme") == BASES


@pytest.mark.parametrize("rule", ["tenant"])
async def test_operator_may_allow_templates_of_tenants(tenancy: Tenancy, text_model: TextModel) -> None:
    await tenancy.tenant("acme")
    made = await upload(tenancy, "acme+", {"tokenizer_config.json": CONFIG})
    assert made.data["chat_template"]["used"] is True
    assert await prompt_of(tenancy, text_model, key="acme") == RENDERED


@pytest.mark.parametrize("rule", ["off"])
async def test_off_keeps_no_template_and_refuses_none(tenancy: Tenancy, text_model: TextModel) -> None:
    made = await register(tenancy, {"chat_template.jinja": "{% broken"})
    assert (made.status, made.data["chat_template"]["differs"], made.data["chat_template"]["used"]) == (
        201,
        True,
        False,
    )
    assert made.data["digest"] == adapter_digest(tenancy.house.root / "made")
    assert await prompt_of(tenancy, text_model) == BASES


async def test_slow_template_is_a_400_and_the_loop_and_others_go_on(tenancy: Tenancy, text_model: TextModel) -> None:
    await register(tenancy, {"chat_template.jinja": SLOW})
    await register(tenancy, {"chat_template.jinja": OWN}, name="acme/b", seed=2)
    body = {"model": "acme/a", "messages": MESSAGES, "max_tokens": 1}
    slow = [asyncio.create_task(tenancy.call("admin", "POST", "/v1/chat/completions", body)) for _ in range(4)]
    waits = []
    while not all(task.done() for task in slow):
        began = time.monotonic()
        assert (await tenancy.call("admin", "GET", "/health")).status == 200
        waits.append(time.monotonic() - began)
        assert await prompt_of(tenancy, text_model, "acme/b") == RENDERED
    assert sorted(waits)[len(waits) // 2] < 0.2
    for reply in await asyncio.gather(*slow):
        assert (reply.status, reply.data["error"]["param"]) == (400, "messages")
        assert "0.5 s" in reply.message


@pytest.mark.many(1)
@pytest.mark.parametrize("same", [False, True])
async def test_slow_templates_of_one_tenant_hold_no_other_up(tenancy: Tenancy, same: bool) -> None:
    """However many texts it brings, and if the other's text is one of them."""
    texts = [f"{SLOW}{{# {number * (not same)} #}}" for number in range(6)]
    for number, text in enumerate(texts):
        await register(tenancy, {"chat_template.jinja": text}, name=f"acme/a{number}", seed=number)
    await register(tenancy, {"chat_template.jinja": texts[0] if same else OWN}, name="globex/b", seed=9)

    def chat(model: str, content: str) -> asyncio.Task[Any]:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return asyncio.create_task(tenancy.call("admin", "POST", "/v1/chat/completions", body))

    slow = [chat(f"acme/a{number}", "Hello") for number in range(6)]
    await asyncio.sleep(0.1)
    assert (await chat("globex/b", "Hi")).status == 200
    assert sum(not task.done() for task in slow) >= 4
    await asyncio.gather(*slow)


NO_HELLO = "{% if 'Hello' in messages[0].content %}{{ raise_exception('no hello') }}{% endif %}ok"


async def test_template_that_refuses_messages_is_a_400_in_its_words(tenancy: Tenancy) -> None:
    await register(tenancy, {"chat_template.jinja": NO_HELLO})
    reply = await tenancy.call("admin", "POST", "/tokenize", {"model": "acme/a", "messages": MESSAGES})
    said = "The adapter's chat template refuses these messages: no hello"
    assert (reply.status, said in reply.message) == (400, True)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WITH_TOOLS = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}<|end|>"


async def test_own_template_for_tools_is_used_with_tools(tenancy: Tenancy, text_model: TextModel) -> None:
    named = [{"name": "tool_use", "template": WITH_TOOLS}, {"name": "default", "template": OWN}]
    await register(tenancy, {"tokenizer_config.json": json.dumps({"chat_template": named})})
    assert await prompt_of(tenancy, text_model) == RENDERED
    body = {"model": "acme/a", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    reply = await tenancy.call("admin", "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.data
    found = text_model.decode(tenancy.house.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert found == "weather Hello<|end|>"


@pytest.mark.many(1)
@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_slow_template_with_tools_is_a_400_too(tenancy: Tenancy, tools: Any) -> None:
    await register(tenancy, {"chat_template.jinja": SLOW})
    body = {"model": "acme/a", "messages": MESSAGES, "tools": tools, "tool_choice": "none", "max_tokens": 1}
    reply = await tenancy.call("admin", "POST", "/v1/chat/completions", body)
    assert (reply.status, "0.5 s" in reply.message) == (400, True)
