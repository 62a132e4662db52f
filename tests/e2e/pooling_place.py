"""A tiny BERT on a real server: its adapters, and what transformers and PEFT alone make of a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, KEY
from tests.e2e.plain_http import call
from tests.engine_choice import EngineHost
from tests.pooling_models import load_adapter_alone, load_base, pooled, save_pooling_adapter, save_pooling_model
from tests.text.tiny_tokenizer import CORPUS, bert_tokenizer

TEXTS = ["the fox", "hello world!", "wie geht es dir?", "a", CORPUS[0], CORPUS[1], "the lazy dog jumps"]
NAMES = ("acme/a", "acme/b", "globex/c")
LABELS = ["bad", "fair", "good"]  # of the first adapter's registration
MAX_LENGTH = 96
TOLERANCE = 1e-4


class Place:
    """The base classifies with one label; adapters have heads of their own with three."""

    def __init__(self, root: Path, task: str) -> None:
        self.root, self._task = root, task
        self.tokenizer: PreTrainedTokenizerFast = bert_tokenizer()
        size, labels = len(self.tokenizer), 3 if task == "classify" else None
        self.model = save_pooling_model(
            "bert", task, root / "model", num_labels=1, vocab_size=size, max_position_embeddings=MAX_LENGTH
        )
        self.tokenizer.save_pretrained(self.model)
        self.adapters = {
            name: save_pooling_adapter(self.model, root / "adapters" / name, task, seed, labels, r=2 << seed)
            for seed, name in enumerate(NAMES)
        }
        self._alone: dict[str | None, Any] = {
            name: load_adapter_alone(self.model, folder, task, labels) for name, folder in self.adapters.items()
        }
        self._alone[None] = load_base(self.model, task)

    @torch.inference_mode()
    def plain(self, adapter: str | None, *texts: str) -> torch.Tensor:
        """Of one text or pair: the mean of its hidden states, with length 1; or its logits."""
        output = self._alone[adapter](**self.tokenizer(*texts, return_tensors="pt"))
        return output.logits[0] if self._task == "classify" else pooled(output.last_hidden_state[0], "mean")


def serving(host: EngineHost, place: Place) -> Iterator[ServerProcess]:
    """A server of the model, on which the adapters are registered by the admin API."""
    arguments = [
        "--model", str(place.model), "--served-model-name", "tiny", "--admin-key", KEY,
        "--store", str(place.root / "store"), "--adapter-root", str(place.root), "--max-loras", "2",
    ]  # fmt: skip
    with host.serving(arguments, place.root / "log") as process:
        for name, folder in place.adapters.items():
            metadata = {"labels": LABELS} if name == NAMES[0] else {}
            body = {"id": name, "source": str(folder), "metadata": metadata}
            reply = call(f"{process.url}/admin/adapters", body, ADMIN)
            assert reply.status == 201, reply.text
        yield process
