"""Time to the first token of a long prompt, cold and with its beginning in the prefix cache.

    python -m benchmarks.prefix_cache [--model FOLDER] [--tokens 400] [--out FILE.json]

The real engine in this process, one request at a time, no HTTP: milliseconds, the median and the least of ROUNDS, each
with a prompt of its own. "warm": the same prompt again; "half": a prompt whose first half is known.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from benchmarks.report import machine
from lora_serve.commands.demo import DATA
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.messages import PromptEvent
from lora_serve.core.request import InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.model.build import build_model

ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DATA / "model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefix-cache.json"))
    arguments = parser.parse_args()
    settings = Settings(model=str(arguments.model))
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), settings.part(AdapterConfig).max_loras)
    engine = build_engine(
        parts.runner,
        parts.spec,
        parts.num_blocks,
        settings.part(EngineConfig),
        settings.part(AdapterConfig),
        lambda adapter: None,
    )
    found = measure(engine, arguments.tokens, parts.spec.vocab_size)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "prompt_tokens": arguments.tokens, "dtype": parts.spec.dtype, "ms": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found))


def measure(engine: Engine, num_tokens: int, vocab_size: int) -> dict[str, dict[str, float]]:
    """Milliseconds to the first token, by what was known of the prompt."""
    times: dict[str, list[float]] = {"cold": [], "half": [], "warm": []}
    generator = random.Random(0)
    for _ in range(ROUNDS):
        prompt, other = (tuple(generator.choices(range(10, vocab_size), k=num_tokens)) for _ in range(2))
        half = prompt[: num_tokens // 2] + other[num_tokens // 2 :]
        for name, tokens in (("cold", prompt), ("half", half), ("warm", prompt)):
            times[name].append(first_token_ms(engine, tokens))
    return {
        name: {"median": round(statistics.median(found), 2), "least": round(min(found), 2)}
        for name, found in times.items()
    }


def first_token_ms(engine: Engine, prompt: tuple[int, ...]) -> float:
    """One request of one token, from its submission on."""
    start = time.monotonic()
    request = InferenceRequest("r", prompt, SamplingParams(max_tokens=1, temperature=0.0), arrival_time=start)
    events = engine.scheduler.add(request)
    while not any(isinstance(event, PromptEvent) for event in events):
        _, events = engine.step()
    return (time.monotonic() - start) * 1e3


if __name__ == "__main__":
    main()
