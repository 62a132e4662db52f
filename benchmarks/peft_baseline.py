"""The baseline: PEFT's `generate(adapter_names=[...])` in static, left-padded batches, in a process of its own.

Run as a script it is the worker: it loads the model and the adapters, then reads one JSON line of jobs at a time
from standard input and answers each with one JSON line of times. `PeftWorker` is the parent's side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.workload import Job, Load, Measured, Sample


class PeftWorker:
    """A loaded PEFT process, idle between `run` calls."""

    def __init__(self, model: Path, adapters: dict[str, Path], dtype: str) -> None:
        named = [f"{name}={folder}" for name, folder in adapters.items()]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peft_baseline", str(model), dtype, *named]
        root = Path(__file__).resolve().parents[1]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self.start_seconds = float(self._read()["start_seconds"])

    def run(self, jobs: Sequence[Job], load: Load) -> Measured:
        """All jobs in batches of `load.concurrency`, in order; a batch starts when the one before has ended."""
        request = {"jobs": [asdict(job) for job in jobs], "size": load.concurrency, "tokens": load.output_tokens}
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer = self._read()
        samples = tuple(
            Sample(item["first_token"], tuple(item["gaps"]), tuple(item["token_ids"])) for item in answer["samples"]
        )
        return Measured(answer["seconds"], samples)

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the PEFT process ended with code {self._child.wait()}")
        return json.loads(line)

    def close(self) -> None:
        with self._child:  # closing its standard input ends it
            pass


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
    start = time.perf_counter()
    network = _load(options.model, options.dtype, dict(item.split("=", 1) for item in options.adapters))
    print(json.dumps({"start_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        jobs, size = request["jobs"], request["size"]
        start = time.perf_counter()
        batches = [jobs[index : index + size] for index in range(0, len(jobs), size)]
        samples = [sample for batch in batches for sample in _run_batch(network, batch, request["tokens"])]
        print(json.dumps({"seconds": time.perf_counter() - start, "samples": samples}), flush=True)


if __name__ == "__main__":
    _work()
