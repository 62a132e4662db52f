"""Trains and measures the demo's adapter that calls tools."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from demo_checkpoint import SAFE_MARGIN, Measured, answers, load_base, margin, save_adapter
from demo_model import END, fit
from demo_tenants import ALL_LINEAR
from demo_tool_chats import TEMPLATE, Chat, ToolBatches, call_message, chat_training_row, chats, turns
from demo_tools import HELD_OUT, LEARNED, LOOKUPS, TOOLS, UNSEEN, Lookup
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerFast

ADAPTER, TITLE = "summit/tools", "calls of tools"
LORA = {"r": 32, "lora_alpha": 64}
NUM_CHATS = {"held out": 300, "unseen cities": 60}
NUM_PROMPTS = 25
MAX_ANSWER = 90  # tokens


@dataclass(frozen=True)
class Stage:
    """Steps with a learning rate of one cycle; the share of chats with one tool only falls in them."""

    num_steps: int
    rate: float
    num_easy: int  # steps before it falls
    num_mixing: int  # steps in which it falls
    most_easy: float
    least_easy: float = 0.1

    def shares(self) -> Iterator[float]:
        """The share of each step."""
        for step in range(self.num_steps):
            share = 1 - (step - self.num_easy) / self.num_mixing
            yield min(self.most_easy, max(self.least_easy, share))


# So small a model, shown all kinds of chats from the start, had not learned to copy after 600 steps.
# The weights that are shipped were made in pieces: the first stage with a third tool (currencies) that was given up,
# the second as 200, 420, 360 and 200 steps, each going on from the one before; the last two had orders without a day.
# evaluation.json sums these pieces, of which the number of chats of the first two (10600 of 16500) and the seconds of
# the second (250 of 2131) are estimates. This script in one run has not been timed or measured.
STAGES = (Stage(1500, 3e-3, 500, 400, 1.0), Stage(1180, 1.2e-3, 0, 200, 0.4))


@dataclass(frozen=True)
class Asked:
    """One turn of the assistant in a held-out chat: the rendered prompt, and the only right answer."""

    kind: str
    prompt: str
    answer: str


def train_tools(out: Path, seed: int) -> Measured:
    """Train, save with the chat template, load again and measure; runs in a process of its own."""
    started = time.monotonic()
    model, tokenizer = load_base(out)
    config = LoraConfig(**LORA, target_modules=ALL_LINEAR, task_type="CAUSAL_LM", lora_dropout=0.0)
    peft_model = get_peft_model(model, config)
    num_chats = 0
    for number, stage in enumerate(STAGES):
        parts = ToolBatches(tokenizer, Random(f"{ADAPTER} {seed} {number}"), LEARNED, stage.shares())
        fit(model, iter(parts), num_steps=stage.num_steps, rate=stage.rate, is_mixed=True)
        num_chats += parts.num_chats
    seconds = time.monotonic() - started
    folder = out / "adapters" / ADAPTER
    num_weights = save_adapter(peft_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return measure(out, seed, num_chats, num_weights, seconds)


def measure(out: Path, seed: int, num_training: int, num_weights: int, seconds: float) -> Measured:
    """The saved adapter and the base on chats that neither has seen, both with the adapter's template."""
    base, tokenizer = load_base(out)
    asked = held_out_turns(tokenizer, seed)
    prompts = [tokenizer.encode(one.prompt, add_special_tokens=False) for one in asked]
    calls = [index for index, one in enumerate(asked) if one.kind == "call"][:100]
    by_base = answers(base, tokenizer, [prompts[index] for index in calls], MAX_ANSWER)
    adapted = PeftModel.from_pretrained(base, str(out / "adapters" / ADAPTER)).eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for one, said in zip(asked, answers(adapted, tokenizer, prompts, MAX_ANSWER), strict=True):
        right[one.kind].append(said == one.answer)
        if said != one.answer and right[one.kind].count(False) < 4:
            print(f"{ADAPTER}: {one.kind}: {said!r}, not {one.answer!r}", flush=True)
    kinds = {kind: {"exact_match": sum(each) / len(each), "num_inputs": len(each)} for kind, each in right.items()}
    return Measured(
        ADAPTER,
        TITLE,
        kinds["call"]["exact_match"],
        sum(said == asked[index].answer for index, said in zip(calls, by_base, strict=True)) / len(calls),
        len(right["call"]),
        num_training,
        int(LORA["r"]),
        num_weights,
        round(seconds, 1),
        shipped(adapted, tokenizer, seed),
        kinds,
    )


def held_out_turns(tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Asked]:
    """The assistant's turns of the last round of each held-out chat."""
    found: list[Asked] = []
    for side, name in ((HELD_OUT, "held out"), (UNSEEN, "unseen cities")):
        for chat in islice(chats(Random(f"{name} {seed}"), side), NUM_CHATS[name]):
            if name == "held out" or _has_weather_call(chat):
                found += _last_round(tokenizer, chat, "" if name == "held out" else f", {name}")
    return found


def _has_weather_call(chat: Chat) -> bool:
    return chat.kind == "call" and chat.messages[-3]["tool_calls"][0]["function"]["name"] == "get_weather"


def _last_round(tokenizer: PreTrainedTokenizerFast, chat: Chat, suffix: str) -> Iterator[Asked]:
    num_turns = 2 if chat.kind in ("call", "two calls") else 1
    for index, (prompt, said) in enumerate(list(turns(tokenizer, chat))[-num_turns:]):
        yield Asked(("answer to " if index else "") + chat.kind + suffix, prompt, said.removesuffix(END))


def shipped(adapted: PeftModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[dict[str, Any]]:
    """Questions with all tools offered whose call and answer are sure; each tool first once."""
    rng, found = Random(f"shipped {seed}"), []
    while len(found) < NUM_PROMPTS:
        lookup = HELD_OUT.lookup(rng, LOOKUPS[len(found) % len(LOOKUPS)])
        chat = one_lookup(lookup)
        if lookup.question not in {item["prompt"] for item in found} and is_sure(adapted, tokenizer, chat):
            found.append({"adapter": ADAPTER, "task": TITLE, "prompt": lookup.question} | _texts(tokenizer, chat))
    return found


def _texts(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> dict[str, Any]:
    """What the model writes to the question; the call in it, as OpenAI's clients get it; the rest of the chat."""
    (_, call), (_, answer) = turns(tokenizer, chat)
    function = chat.messages[1]["tool_calls"][0]["function"]
    return {
        "answer": call.removesuffix(END),
        "call": {"name": function["name"], "arguments": json.dumps(function["arguments"])},
        "result": chat.messages[2]["content"],
        "final_answer": answer.removesuffix(END),
    }


def one_lookup(lookup: Lookup) -> Chat:
    """The chat of a client that offers all tools."""
    result = {"role": "tool", "tool_call_id": "call_0", "content": lookup.result}
    question, answer = {"role": "user", "content": lookup.question}, {"role": "assistant", "content": lookup.answer}
    return Chat("call", (question, call_message([lookup]), result, answer), tuple(TOOLS.values()))


def is_sure(adapted: PeftModel, tokenizer: PreTrainedTokenizerFast, chat: Chat) -> bool:
    """True if every token of the call and of the answer is far above the next best."""
    return margin(adapted, chat_training_row(tokenizer, chat)) >= SAFE_MARGIN
