"""An adapter's own end-of-text token ends its answers, where PEFT's `generate` ends them, and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.oracle import load_alone, save_adapter

PROMPT, LENGTH = [5, 6, 7], 24
KINDS = ("tokenizer_config.json", "generation_config.json")


def generated(model: Any, ends: Sequence[int]) -> list[int]:
    """The new tokens of PEFT's and transformers' own `generate`."""
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)
    out = model.generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0,
        eos_token_id=list(ends) or None,
    )  # fmt: skip
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def trained(server: ServerProcess, site: Site) -> tuple[list[int], int]:
    """All the tokens that PEFT generates with no end; the one that ends the adapters `ends/...`, not the first."""
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    folder = save_adapter(site.model, site.root / "ends", seed=21, r=4)
    model, base = load_alone(site.model, folder), (2, tokenizer.eos_token_id)
    model.generation_config.eos_token_id = None
    whole = generated(model, ())
    end = next(token for token in whole[3:] if token not in base and whole.index(token) > 2)
    assert generated(model, [*base, end]) == whole[: whole.index(end) + 1]
    contents = {KINDS[0]: {"eos_token": tokenizer.convert_ids_to_tokens(end)}, KINDS[1]: {"eos_token_id": [end, 9999]}}
    for kind in (None, *KINDS):
        for old in KINDS:
            (folder / old).unlink(missing_ok=True)
        if kind is not None:
            (folder / kind).write_text(json.dumps(contents[kind]))
        name = f"ends/{kind or 'none'}"
        card = call(f"{server.url}/admin/adapters", {"id": name, "source": str(folder)}, ADMIN)
        assert card.status == 201, card.text
        assert card.json["eos_token_ids"] == ([] if kind is None else [end])
        assert any("9999" in text and "ends no answer" in text for text in card.json["warnings"]) is (kind == KINDS[1])
    return whole, end


@pytest.mark.engines("thread", nightly=["process"])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_ends_where_transformers_ends_it(
    site: Site, openai: OpenAI, trained: tuple[list[int], int], kind: str
) -> None:
    whole, end = trained
    count = whole.index(end) + 1
    greedy: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
    answers = {name: openai.completions.create(model=f"ends/{name}", **greedy) for name in ("none", kind)}
    assert answers["none"].usage is not None
    assert (answers["none"].choices[0].finish_reason, answers["none"].usage.completion_tokens) == ("length", LENGTH)
    usage, choice = answers[kind].usage, answers[kind].choices[0]
    assert usage is not None
    assert (usage.completion_tokens, choice.finish_reason) == (count, "stop")
    assert choice.text == AutoTokenizer.from_pretrained(site.model).decode(whole[: count - 1])
    chunks = list(openai.completions.create(model=f"ends/{kind}", stream=True, **greedy))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "stop"
    for extra, expected in (({"ignore_eos": True}, LENGTH), ({"min_tokens": count + 2}, count + 3)):
        longer = openai.completions.create(model=f"ends/{kind}", extra_body=extra, **greedy)
        assert longer.usage is not None
        assert longer.usage.completion_tokens >= min(LENGTH, expected), extra


@pytest.mark.engines("thread", nightly=["process"])
def test_end_is_allowed_where_a_grammar_allows_the_bases(openai: OpenAI, trained: tuple[list[int], int]) -> None:
    """Favoured, and the base's own ends not, it comes as soon as the grammar lets the answer end, and not before."""
    favoured = {str(trained[1]): 100, "1": -100, "2": -100}
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "logit_bias": favoured}
    grammar = {"structured_outputs": {"regex": "ab{0,50}"}}
    for name, text, reason in (KINDS[0], "a", "stop"), ("none", "ab", "length"):
        choice = openai.completions.create(model=f"ends/{name}", extra_body=grammar, **body).choices[0]
        assert choice.text.startswith(text)
        assert (len(choice.text) == 1, choice.finish_reason) == (text == "a", reason), name
