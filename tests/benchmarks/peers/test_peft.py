"""The PEFT worker against transformers itself: a static batch gives what each prompt alone gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import make_checkpoints, num_weight_bytes
from benchmarks.peers.peft import Peft
from benchmarks.peers.seam import Checkpoints
from benchmarks.workload import Job, Load


def merged_model(model: Path, adapter: Path | None) -> torch.nn.Module:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b, a = tensors[name.replace("lora_A", "lora_B")].float(), tensors[name].float()
            network.get_submodule(path).weight.data += b @ a  # lora_alpha == r: the scale is 1
    return network


def greedy(network: torch.nn.Module, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.nightly
def test_a_mixed_static_batch_answers_as_each_merged_model_alone(tmp_path: Path) -> None:
    model, adapters = make_checkpoints(tmp_path, "tiny", 2, seed=0)
    first, second = adapters
    jobs = [Job((5, 6, 7, 8), None), Job((9, 10), first), Job((11, 12, 13), second)]
    load = Load(concurrency=3, output_tokens=4)
    worker = Peft("float32").start(Checkpoints(model, adapters, tmp_path), load, num_threads=1)
    try:
        found = worker.run(jobs, load)
    finally:
        worker.stop()
    for job, sample in zip(jobs, found.samples, strict=True):
        network = merged_model(model, adapters.get(job.adapter or ""))
        assert sample.token_ids == greedy(network, job.prompt, 4)
        assert len(sample.gaps) == 3
    assert len({sample.token_ids for sample in found.samples}) == 3


def test_checkpoints_are_made_once_and_counted_without_their_headers(tmp_path: Path) -> None:
    model, adapters = make_checkpoints(tmp_path, "tiny", 1, seed=0)
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert make_checkpoints(tmp_path, "tiny", 1, seed=0) == (model, adapters)
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    tensors = load_file(model / "model.safetensors")
    assert num_weight_bytes(model) == sum(tensor.nbytes for tensor in tensors.values())
