"""Requests for an adapter with tokens of its own: words and ids at the door are those of its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import Canary, VersionEntry
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, ModelSpec
from lora_serve.server.services import Services
from lora_serve.text.tokenizer import TextModel
from tests.fake_verifier import FakeVerifier
from tests.server.conftest import ADMIN, BASE, HIDDEN
from tests.verifying_registry import VerifyingRegistry


@pytest.fixture
def spec(text_model: TextModel) -> ModelSpec:
    """A model whose embedding and output head an adapter may replace."""
    size = text_model.vocab_size
    linears = {"model.q_proj": LinearShape(HIDDEN, HIDDEN), "lm_head": LinearShape(HIDDEN, size)}
    modules: dict[str, Any] = {name: {"weight": (size, HIDDEN)} for name in ("model.embed_tokens", "lm_head")}
    embeddings = {"model.embed_tokens": EmbeddingShape(size, HIDDEN)}
    end = text_model.wrapper.convert_tokens_to_ids("<|end|>")
    return ModelSpec(
        BASE, "LlamaForCausalLM", size, 128, (end,), 1, linears, 0, "float32", "cpu", embeddings, modules,
        "model.embed_tokens", "lm_head",
    )  # fmt: skip


def make_adapter(folder: Path, text_model: TextModel, *, with_token: bool) -> Path:
    """An adapter with one token more than the base, or one with none of its own."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    random, size = np.random.default_rng(0), text_model.vocab_size + 1
    shapes = {"model.q_proj.lora_A": (2, HIDDEN), "model.q_proj.lora_B": (HIDDEN, 2)}
    if with_token:
        config["modules_to_save"] = ["embed_tokens", "lm_head"]
        shapes |= {"model.embed_tokens": (size, HIDDEN), "lm_head": (size, HIDDEN)}
        added = [{"id": text_model.vocab_size, "content": "<ticket>", "special": False}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{name}.weight": random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path, text_model: TextModel) -> Path:
    """An adapter with one token more than the base."""
    return make_adapter(tmp_path / "root" / "tickets", text_model, with_token=True)


@pytest.fixture
def plain(tmp_path: Path, text_model: TextModel) -> Path:
    """An adapter with the base's tokens."""
    return make_adapter(tmp_path / "root" / "plain", text_model, with_token=False)


async def registered(
    services: Services, text_model: TextModel, name: str, folder: Path, *, activate: bool = True
) -> AdapterRef:
    config = services.adapter_config
    tokens = BaseTokens(text_model.vocabulary())
    registry = VerifyingRegistry(
        config, services.spec, services.catalog, DiskStore(config.store), FakeVerifier(), tokens
    )
    done = await services.registrations.run(lambda: registry.register_folder(name, folder, activate=activate))
    return done.ref


@pytest.fixture
async def tickets(services: Services, folder: Path, text_model: TextModel) -> AdapterRef:
    """The adapter with the token, registered."""
    return await registered(services, text_model, "acme/tickets", folder)


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_tokenize_and_detokenize_know_the_tokens_of_the_adapter_alone(
    http: aiohttp.ClientSession, tickets: AdapterRef, text_model: TextModel
) -> None:
    new = text_model.vocab_size
    _, own = await post(http, "/tokenize", model="acme/tickets", prompt="<ticket>", return_token_strs=True)
    assert (own["tokens"][1:], own["token_strs"][1:]) == ([new], ["<ticket>"])
    _, chat = await post(http, "/tokenize", model="acme/tickets", messages=[{"role": "user", "content": "<ticket>"}])
    assert new in chat["tokens"]
    _, base = await post(http, "/tokenize", model=BASE, prompt="<ticket>")
    assert base["count"] > 2
    assert max(base["tokens"]) < new
    assert await post(http, "/detokenize", model="acme/tickets", tokens=[new]) == (200, {"prompt": "<ticket>"})
    assert (await post(http, "/detokenize", model=BASE, tokens=[new]))[0] == 400
    assert (await post(http, "/detokenize", model="acme/tickets", tokens=[new + 1]))[0] == 400


async def test_tokenize_finds_the_adapter_as_an_answer_does(
    http: aiohttp.ClientSession, services: Services, tickets: AdapterRef, plain: Path, text_model: TextModel
) -> None:
    new, body = text_model.vocab_size, {"prompt": "<ticket>", "add_special_tokens": False}
    for named in ({"adapter_id": "acme/tickets"}, {"adapters": [{"id": "acme/tickets"}]}):
        assert (await post(http, "/tokenize", **named, **body))[1]["tokens"] == [new]
        chat = await post(http, "/tokenize", **named, messages=[{"role": "user", "content": "<ticket>"}])
        assert new in chat[1]["tokens"]
        assert await post(http, "/detokenize", **named, tokens=[new]) == (200, {"prompt": "<ticket>"})
    async with http.post("/tokenize", json=body, headers={"X-Adapter-Id": "acme/tickets"}) as answered:
        assert (await answered.json())["tokens"] == [new]
        assert answered.headers["X-Adapter-Digest"] == tickets.digest
    await registered(services, text_model, "acme/other", plain)
    for path, rest in (("/tokenize", body), ("/detokenize", {"tokens": [1]})):
        assert (await post(http, path, adapter_id="acme/nobody", **rest))[0] == 404
        assert (await post(http, path, adapter_id="acme/tickets", model="acme/other", **rest))[0] == 400


async def test_tokenize_means_the_default_version_unless_a_user_has_the_canary(
    http: aiohttp.ClientSession, services: Services, tickets: AdapterRef, plain: Path, text_model: TextModel
) -> None:
    await registered(services, text_model, "acme/tickets", plain, activate=False)
    services.catalog.set_route("acme/tickets", 1, Canary(2, 50.0))
    body, new = {"adapter_id": "acme/tickets", "prompt": "<ticket>", "add_special_tokens": False}, text_model.vocab_size
    assert [(await post(http, "/tokenize", **body))[1]["tokens"] for _ in range(20)] == [[new]] * 20
    of_users = [(await post(http, "/tokenize", **body, user=f"u{number}"))[1]["tokens"] for number in range(20)]
    assert 0 < of_users.count([new]) < 20


@pytest.mark.parametrize(
    "fields", [{"prompt": [5]}, {"prompt": "x", "stop_token_ids": [5]}, {"prompt": "x", "logit_bias": {"5": 1}}]
)
async def test_ids_are_checked_against_the_adapters_vocabulary(
    http: aiohttp.ClientSession, tickets: AdapterRef, text_model: TextModel, fields: dict[str, Any]
) -> None:
    for model, token_id, status in (
        ("acme/tickets", text_model.vocab_size, 200),
        ("acme/tickets", text_model.vocab_size + 1, 400),
        (BASE, text_model.vocab_size, 400),
    ):
        own = json.loads(json.dumps(fields).replace("5", str(token_id)))
        assert (await post(http, "/v1/completions", model=model, max_tokens=2, **own))[0] == status


@pytest.mark.parametrize("on_cold", ["base", "previous"])
async def test_nobody_with_another_vocabulary_answers_while_the_adapter_is_cold(
    http: aiohttp.ClientSession, services: Services, tickets: AdapterRef, on_cold: str
) -> None:
    plain = VersionEntry(0, "sha256:" + "1" * 64, 2, 10, {}, "test", 0.0)
    Registration(id="acme/tickets").commit(services.catalog.ledger, plain)
    newest = replace(services.catalog.entry("acme/tickets").versions[0], digest="sha256:" + "2" * 64)
    Registration(id="acme/tickets").commit(services.catalog.ledger, newest)
    status, body = await post(http, "/v1/completions", model="acme/tickets", prompt="x", on_cold=on_cold)
    assert (status, body["error"]["param"]) == (400, "on_cold")
    assert "vocabularies differ" in body["error"]["message"]


async def test_the_prompt_and_its_log_probabilities_spell_the_new_token(
    http: aiohttp.ClientSession, tickets: AdapterRef
) -> None:
    body = {"prompt": "a<ticket>", "max_tokens": 0, "echo": True, "logprobs": 0, "add_special_tokens": False}
    _, own = await post(http, "/v1/completions", model="acme/tickets", **body)
    _, base = await post(http, "/v1/completions", model=BASE, **body)
    assert own["choices"][0]["logprobs"]["tokens"] == ["a", "<ticket>"]
    assert own["usage"]["prompt_tokens"] == 2 < base["usage"]["prompt_tokens"]
    assert own["choices"][0]["text"] == base["choices"][0]["text"] == "a<ticket>"


async def test_a_tokenizer_may_be_a_part_of_an_upload(
    http: aiohttp.ClientSession, folder: Path, services: Services
) -> None:
    form = aiohttp.FormData()
    for path in folder.iterdir():
        form.add_field(path.name, path.read_bytes(), filename=path.name)
    async with http.put("/admin/adapters/acme/tickets", data=form, headers=ADMIN) as answer:
        assert answer.status == 201, await answer.text()
        card = await answer.json()
    assert "added_tokens" in card["kinds"]
    assert [token.content for token in services.catalog.resolve("acme/tickets").ref.traits.added_tokens] == ["<ticket>"]


async def test_loading_an_adapter_with_tokens_again_by_vllms_call_is_200(
    http: aiohttp.ClientSession, folder: Path, services: Services
) -> None:
    for _ in range(2):
        body = {"lora_name": "tickets", "lora_path": str(folder)}
        async with http.post("/v1/load_lora_adapter", json=body, headers=ADMIN) as answer:
            assert answer.status == 200, await answer.text()
    assert len(services.catalog.entry("tickets").versions) == 1
