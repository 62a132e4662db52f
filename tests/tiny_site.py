"""A model with a tokenizer and adapters of several ranks, as a server is given them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.oracle import save_adapter, save_tiny_model
from tests.text.tiny_tokenizer import byte_level_tokenizer


def save_site(root: Path, names: Iterable[str]) -> tuple[Path, dict[str, Path]]:
    """The folders of the model and, by name, of the adapters, whose ranks are 2, 4 and 8 in turn."""
    tokenizer = byte_level_tokenizer()
    model = save_tiny_model("llama", root / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    adapters = {
        name: save_adapter(model, root / "adapters" / name, seed=seed, r=2 << seed % 3, lora_alpha=8)
        for seed, name in enumerate(names)
    }
    return model, adapters
