"""The servers of a soak: a tiny model whose template takes tools, and adapters whose answers transformers gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.site import KEY, engine_flags
from lora_serve.commands.server_process import ServerProcess
from tests.canary.questions import BASE
from tests.canary.races import Field, make_field
from tests.oracle import save_adapter, save_tiny_model
from tests.text.tool_templates import tool_model

NUM_ADAPTERS = 24
READY_SECONDS = 300.0


@dataclass(frozen=True)
class Site:
    """Files that the servers of all hosts share."""

    root: Path
    model: Path
    runners: Field

    @contextmanager
    def server(self, engine: str, replicas: int) -> Iterator[ServerProcess]:
        """A server that is ready. Engines that are killed are started again as often as that is."""
        arguments = [
            "--model", str(self.model), "--served-model-name", BASE, "--admin-key", KEY, "--auth", "on",
            "--store", str(self.root / engine), "--adapter-root", str(self.root), "--max-model-len", "2048",
            "--kv-cache-memory", "16MiB", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
            "--max-loras", "6", "--max-cpu-loras", "8", "--engine-max-restarts", "100", "--usage-flush-seconds", "1",
            "--admin-acts-per-minute", "1000000", *engine_flags(engine, replicas),
        ]  # fmt: skip
        with ServerProcess(arguments, self.root / f"{engine}.log") as process:
            process.wait_until_ready(READY_SECONDS)
            yield process


def make_site(root: Path) -> Site:
    tokenizer = tool_model("qwen2_5").wrapper
    model = save_tiny_model(
        "llama", root / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=2048,
    )  # fmt: skip
    tokenizer.save_pretrained(model)
    template = save_adapter(model, root / "template", seed=1, std=0.2, r=4)
    return Site(root, model, make_field(model, template, root / "racers", NUM_ADAPTERS))
