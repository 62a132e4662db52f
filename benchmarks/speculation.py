"""What guessing tokens brings: the demo's adapters with and without, and random text, where it must cost nothing.

    python -m benchmarks.speculation [--rows 1 4 16] [--prompts 1000] [--rounds 3] [--out FILE.json]

The real engine in this process, no HTTP, the demo's model: two engines that differ in --speculate alone take turns.
Each round sends the same held-out prompts to both, so many rows at a time; a row that ends makes room for the next.
Tokens per second are medians over the rounds, their ratio is the median of the rounds' own. Answers are greedy and must
be the same tokens from both. `random`: prompts of random tokens, sampled so hot that hardly a guess comes true.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio
from benchmarks.report import kernel_level, machine, result_file
from lora_serve.core.messages import TokenEvent
from lora_serve.core.request import InferenceRequest
from tests.local_engine import LocalEngine

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from demo_tenants import TASKS, examples

DATA = Path("lora_serve/demo_data")
ADAPTERS = ("harbor/extract", "acme/sql", "mirror/reverse", "chronos/dates")
RANDOM = "random"
MAX_TOKENS = 64
HOT = 20.0  # a temperature at which nearly any token may come
WARM = 20  # other requests of each case before the first round, on both engines
Prompt = tuple[int, ...]


class Side:
    """One engine, and what it answered."""

    def __init__(self, speculate: str, num_rows: int, adapters: Sequence[str], dtype: str) -> None:
        folders = {name: DATA / "adapters" / name for name in adapters}
        self._engine = LocalEngine(
            DATA / "model",
            folders,
            speculate=speculate,
            dtype=dtype,
            max_num_seqs=num_rows,
            max_loras=max(1, len(folders)),
        )
        self.dtype = self._engine.parts.spec.dtype
        self.answers: dict[Prompt, list[int]] = {}

    def run(self, prompts: Sequence[Prompt], adapter: str | None, num_rows: int, clock: Clock) -> float:
        """Tokens per second."""
        engine = self._engine.engine
        sampling: dict[str, Any] = {"max_tokens": MAX_TOKENS}
        if adapter is None:
            sampling |= {"temperature": HOT, "seed": 1, "ignore_eos": True}
        requests = [self._engine.request(list(prompt), adapter, **sampling) for prompt in prompts]
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        todo: list[InferenceRequest] = requests[::-1]
        start = clock()
        while todo or engine.scheduler.running or engine.scheduler.waiting:
            while todo and len(engine.scheduler.running) + len(engine.scheduler.waiting) < num_rows:
                engine.scheduler.add(todo.pop())
            for event in engine.step()[1]:
                if isinstance(event, TokenEvent):
                    found[event.request_id].append(event.token_id)
            self._engine.load()
        seconds = clock() - start
        for prompt, request in zip(prompts, requests, strict=True):
            self.answers[prompt] = found[request.request_id]
        return sum(map(len, found.values())) / seconds

    def guesses(self) -> tuple[int, int, int]:
        """Drafts, guessed tokens and accepted ones so far."""
        stats = self._engine.engine.stats().speculation
        return stats.num_drafts, stats.num_drafted, stats.num_accepted

    def costs(self) -> dict[str, float]:
        batcher = self._engine.engine.stats().batcher
        return {} if batcher is None else {name: round(1e6 * value, 2) for name, value in batcher.cost.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=1000, help="in all, over the adapters")
    parser.add_argument("--rounds", type=int, default=3, help="that the prompts are cut into, at least")
    parser.add_argument("--cases", nargs="+", default=[*ADAPTERS, RANDOM])
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=CLOCK_HELP)
    parser.add_argument("--out", type=Path, help="default: results/speculation-<kernels' level>.json")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DATA / "model")
    cells = [cell for rows in options.rows for cell in _cells(options, tokenizer, rows)]
    command = " ".join(["python -m benchmarks.speculation", *sys.argv[1:]])
    facts = {"machine": machine(), "command": command, "speculate": options.speculate, "clock": options.clock}
    facts |= {"max_tokens": MAX_TOKENS}
    out: Path = options.out or result_file("speculation", kernel_level())
    out.write_text(json.dumps(facts | {"cells": cells}, indent=1) + "\n")


def _cells(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[dict[str, Any]]:
    adapters = [case for case in options.cases if case != RANDOM]
    sides = {setting: Side(setting, num_rows, adapters, options.dtype) for setting in ("off", options.speculate)}
    count = -(-options.prompts // max(1, len(adapters)))
    cells = []
    for case in options.cases:
        prompts = prompts_of(tokenizer, case, WARM + (count if case != RANDOM else 4 * num_rows * options.rounds))
        cells.append(_cell(sides, case, prompts, num_rows, options))
    return cells


def _cell(
    sides: dict[str, Side], case: str, prompts: list[Prompt], num_rows: int, options: argparse.Namespace
) -> dict[str, Any]:
    plain, drafting = sides.values()
    adapter, clock = (None if case == RANDOM else case), CLOCKS[options.clock]
    for side in sides.values():
        side.run(prompts[:WARM], adapter, num_rows, clock)
    prompts = prompts[WARM:]  # an answer that was given before would be guessed from end to end
    before = drafting.guesses()
    each = -(-len(prompts) // options.rounds)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(options.rounds):
        part = prompts[index * each : (index + 1) * each]
        for name in list(sides) if index % 2 == 0 else list(sides)[::-1]:
            speeds[name].append(sides[name].run(part, adapter, num_rows, clock))
    num_drafts, num_drafted, num_accepted = (now - then for now, then in zip(drafting.guesses(), before, strict=True))
    num_different = sum(drafting.answers[prompt] != plain.answers[prompt] for prompt in prompts)
    cell = {
        "case": case,
        "rows": num_rows,
        "dtype": drafting.dtype,
        "prompts": len(prompts),
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in speeds.items()},
        "ratio": round(median_ratio(speeds[options.speculate], speeds["off"]), 3),
        "drafts": num_drafts,
        "drafted": num_drafted,
        "accepted": num_accepted,
        "different_answers": num_different,
        "step_cost_us": drafting.costs(),
    }
    print(
        f"{drafting.dtype} {case:16} {num_rows:3} rows: {cell['tokens_per_s']}  ratio {cell['ratio']:5}"
        f"  {num_drafts} drafts, {num_accepted} of {num_drafted} accepted, {num_different} of {len(prompts)} differ",
        flush=True,
    )
    return cell


def prompts_of(tokenizer: PreTrainedTokenizerBase, case: str, count: int) -> list[Prompt]:
    """Distinct prompts as the server would make them; of an adapter such that it has not seen."""
    if case == RANDOM:
        generator = random.Random(0)
        return [tuple(generator.randrange(300, 2000) for _ in range(48)) for _ in range(count)]
    task = next(task for task in TASKS if task.adapter == case)
    chosen = islice(examples(task, seed=17, held_out=True), count)
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": example.prompt}], add_generation_prompt=True, return_dict=False
            )
        )
        for example in chosen
    ]


if __name__ == "__main__":
    main()
