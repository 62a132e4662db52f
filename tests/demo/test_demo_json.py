"""The demo's adapter whose registration gives a schema of its answers, on a real server with the real openai client."""

from __future__ import annotations

import json

import jsonschema
from openai import OpenAI

from lora_serve.commands.demo import DATA

JSON_ADAPTER = "harbor/extract"
PROMPTS = [item for item in json.loads((DATA / "prompts.json").read_text()) if item["adapter"] == JSON_ADAPTER]
SCHEMA = json.loads((DATA / "metadata.json").read_text())[JSON_ADAPTER]["response_format"]["json_schema"]["schema"]


def test_json_of_the_registered_schema_without_asking_for_it(openai: OpenAI) -> None:
    for item in PROMPTS[:3]:
        answer = openai.chat.completions.create(
            model=JSON_ADAPTER, temperature=0, messages=[{"role": "user", "content": item["prompt"]}]
        )
        text = answer.choices[0].message.content or ""
        jsonschema.validate(json.loads(text), SCHEMA)
        assert json.loads(text) == json.loads(item["answer"])


def test_json_of_the_registered_schema_however_wild_the_sampling(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=JSON_ADAPTER,
        temperature=2,
        n=4,
        seed=1,
        messages=[{"role": "user", "content": "Tell me a joke."}],
    )
    finished = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    for choice in finished:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    assert finished
