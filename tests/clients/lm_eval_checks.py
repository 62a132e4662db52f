"""lm-eval: log-likelihoods over HTTP (`local-completions`) are those of its own `hf` backend with `peft=`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
from checking import Server
from lm_eval.tasks import TaskManager

ADAPTERS = ("acme/sql", "pulse/sentiment", "relay/routing")
NUM_QUESTIONS = 12  # of each adapter
NEAR = 1e-3


def _task(server: Server, adapter: str) -> dict[str, Any]:
    """A task of multiple choice: the right answer to a prompt among the answers to three others."""
    prompts = json.loads((Path(server.model_folder).parent / "prompts.json").read_text())
    own = [item for item in prompts if item["adapter"] == adapter][:NUM_QUESTIONS]
    documents = [
        {
            "prompt": f"<|user|>{item['prompt']}<|end|><|assistant|>",
            "choices": [own[(index + step) % len(own)]["answer"] for step in range(4)],
            "right": 0,
        }
        for index, item in enumerate(own)
    ]
    name = adapter.replace("/", "_")
    file = Path(f"{name}.jsonl")
    file.write_text("\n".join(json.dumps(document) for document in documents))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _evaluated(model: str, arguments: dict[str, Any], task: dict[str, Any]) -> tuple[float, list[float]]:
    """The accuracy, and the log-likelihood of each choice of each question."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
    )
    name = task["task"]
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    values = [float(choice[0]) for sample in samples for choice in sample["filtered_resps"]]
    return found["results"][name]["acc,none"], values


def check_loglikelihood(server: Server) -> str:
    """Multiple choice on three adapters: accuracy equal, each log-likelihood equal to 1e-3 relative."""
    os.environ["OPENAI_API_KEY"] = server.key
    found = []
    for adapter in ADAPTERS:
        task = _task(server, adapter)
        own = {
            "pretrained": server.model_folder,
            "peft": f"{server.adapters_folder}/{adapter}",
            "dtype": "float32",
            "add_bos_token": True,
        }
        served = {
            "model": adapter,
            "base_url": f"{server.v1}/completions",
            "tokenizer": server.model_folder,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "add_bos_token": True,
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 512,
        }
        (accuracy, values), (right, wanted) = _evaluated("local-completions", served, task), _evaluated("hf", own, task)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, wanted, strict=True))
        assert accuracy == right
        assert worst < NEAR, worst
        found.append(f"{adapter}: accuracy {accuracy}, largest difference {worst:.0e}")
    return "; ".join(found)
