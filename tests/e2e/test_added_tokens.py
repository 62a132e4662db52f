"""An adapter trained on a token of its own, uploaded with its tokenizer, beside a tenant who has no such token."""

from __future__ import annotations

import io
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoTokenizer

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.oracle import load_plain, logprobs_alone, peft_may_warn

TICKET = "<ticket>"
NAME = "acme/tickets"
PROMPT = f"Hello {TICKET} world"


@pytest.fixture(scope="module")
def tickets(server: ServerProcess, site: Site) -> tuple[Any, Any]:
    """The adapter is registered; what PEFT makes of it, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    tokenizer.add_tokens([TICKET])
    torch.manual_seed(5)
    base = load_plain(site.model)
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with peft_may_warn():
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
        )
        model: Any = peft.get_peft_model(base, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) * 0.15
        model.save_pretrained(site.root / "tickets")
    tokenizer.save_pretrained(site.root / "tickets")
    upload(server, site.root / "tickets")
    return model.eval(), tokenizer


def upload(server: ServerProcess, folder: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, "tickets")
    request = urllib.request.Request(
        f"{server.url}/admin/adapters/{NAME}",
        packed.getvalue(),
        {**ADMIN, "Content-Type": "application/x-tar"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 201


def test_the_new_token_is_one_token_for_its_adapter_and_text_for_the_neighbour(
    server: ServerProcess, site: Site, tickets: tuple[Any, Any]
) -> None:
    tokenizer, plain = tickets[1], AutoTokenizer.from_pretrained(site.model)
    own, neighbour = (
        call(f"{server.url}/tokenize", {"model": name, "prompt": PROMPT}).json["tokens"] for name in (NAME, "globex/c")
    )
    assert own == tokenizer(PROMPT)["input_ids"]
    assert own.count(len(plain)) == 1
    assert neighbour == plain(PROMPT)["input_ids"]


def test_the_answer_is_pefts_and_may_hold_the_new_token(openai: OpenAI, tickets: tuple[Any, Any]) -> None:
    model, tokenizer = tickets
    ids, truth = tokenizer(PROMPT)["input_ids"], list[int]()
    while len(truth) < 8:
        truth.append(int(logprobs_alone(model, ids, truth)[-1].argmax()))
    greedy: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    shown = {"ignore_eos": True, "skip_special_tokens": False}
    answer = openai.completions.create(model=NAME, extra_body=shown, **greedy)
    assert answer.choices[0].text == tokenizer.decode(truth)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    favoured = {str(len(tokenizer) - 1): 100}
    forced = openai.completions.create(model=NAME, logit_bias=favoured, extra_body=shown, **greedy)
    assert forced.choices[0].text == TICKET * 8
    stopped = openai.completions.create(model=NAME, logit_bias=favoured, stop=TICKET, **greedy)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    with pytest.raises(BadRequestError, match="token id"):
        openai.completions.create(model="globex/c", logit_bias=favoured, **greedy)
