"""The child of `benchmarks.peers.transformers_batching`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import answer_lines

PAGE_SIZE = 32  # tokens
NUM_PAGES = 256  # 8 192 tokens: 16 requests of 512
MAX_BATCH_TOKENS = 512


def _start(model: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    settings = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=NUM_PAGES, max_batch_tokens=MAX_BATCH_TOKENS, allow_block_sharing=False
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    manager = network.init_continuous_batching(greedy, settings)
    manager.start()
    return manager


def _closed_loop(manager: Any, jobs: list[dict[str, Any]], load: dict[str, int]) -> list[dict[str, Any]]:
    """So many requests at a time; the next one enters when one has ended. A request that fails has no tokens."""
    waiting = iter(enumerate(jobs))
    sent: dict[str, float] = {}
    samples: dict[str, dict[str, Any]] = {}

    def send(index: int, job: dict[str, Any]) -> None:
        sent[str(index)] = time.perf_counter()
        manager.add_request(
            job["prompt"], str(index), max_new_tokens=load["output_tokens"], record_timestamps=True, eos_token_id=-1
        )

    for index, job in itertools.islice(waiting, load["concurrency"]):
        send(index, job)
    while len(samples) < len(sent):
        output = manager.get_result(timeout=1.0)
        if output is None and not manager.is_running():
            break  # those under way have failed
        if output is not None and output.is_finished():
            samples[output.request_id] = _sample(output, sent[output.request_id])
            for index, job in itertools.islice(waiting, 1):
                send(index, job)
    return [samples.get(str(index), _failed()) for index in range(len(jobs))]


def _sample(output: Any, sent: float) -> dict[str, Any]:
    if output.error is not None or not output.timestamps:
        print(f"a request failed: {output.error}", file=sys.stderr)
        return _failed()
    gaps = [later - earlier for earlier, later in itertools.pairwise(output.timestamps)]
    return {"first_token": output.timestamps[0] - sent, "gaps": gaps, "token_ids": output.generated_tokens}


def _failed() -> dict[str, Any]:
    return {"first_token": 0.0, "gaps": [], "token_ids": []}


def _work() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("dtype", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    manager = _start(options.model, options.dtype)

    def work(jobs: list[dict[str, Any]], load: dict[str, int]) -> Iterator[dict[str, Any]]:
        return iter(_closed_loop(manager, jobs, load))

    answer_lines(sys.stdin, work)
    manager.stop(hard_stop=True)


if __name__ == "__main__":
    _work()
