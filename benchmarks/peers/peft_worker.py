"""The child of `benchmarks.peers.peft`: PEFT's `generate(adapter_names=[...])` in static, left-padded batches."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import answer_lines


def _load(model: Path, dtype: str, adapters: dict[str, str]) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    network.generation_config.eos_token_id = None  # every answer has its full length, as with ignore_eos
    (first, folder), *others = adapters.items()
    # adapters stay in the model's own dtype: casting activations to and fro would only slow it down
    network = PeftModel.from_pretrained(network, folder, first, autocast_adapter_dtype=dtype == "float32")
    for name, folder in others:
        network.load_adapter(folder, name, autocast_adapter_dtype=dtype == "float32")
    return network.eval()


def _run_batch(network: Any, jobs: Sequence[dict[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    import torch

    longest = max(len(job["prompt"]) for job in jobs)
    padded = [[0] * (longest - len(job["prompt"])) + list(job["prompt"]) for job in jobs]
    input_ids = torch.tensor(padded)
    times: list[float] = []

    def note_time(*_: Any) -> bool:
        times.append(time.perf_counter())
        return False

    start = time.perf_counter()
    with torch.inference_mode():
        output = _generate(
            network,
            [job["adapter"] for job in jobs],
            input_ids=input_ids,
            attention_mask=(input_ids != 0).long(),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    answers = output[:, longest:].tolist()
    return [{"first_token": times[0] - start, "gaps": gaps, "token_ids": answer} for answer in answers]


def _generate(network: Any, names: Sequence[str | None], **arguments: Any) -> Any:
    """Whatever is PEFT's fastest way for these rows: adapters off, one active adapter, or the mixed batch."""
    if set(names) == {None}:
        with network.disable_adapter():
            return network.generate(**arguments)
    if len(set(names)) == 1:
        network.set_adapter(names[0])
        return network.generate(**arguments)
    return network.generate(adapter_names=[name or "__base__" for name in names], **arguments)


def _work() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("dtype", choices=["bfloat16", "float32"])
    parser.add_argument("adapters", nargs="+", metavar="NAME=FOLDER")
    options = parser.parse_args()
    network = _load(options.model, options.dtype, dict(item.split("=", 1) for item in options.adapters))

    def work(jobs: list[dict[str, Any]], load: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Batches in order; users send their next request when their last is answered, so none waits in between."""
        for index in range(0, len(jobs), load["concurrency"]):
            yield from _run_batch(network, jobs[index : index + load["concurrency"]], load["output_tokens"])

    answer_lines(sys.stdin, work)


if __name__ == "__main__":
    _work()
