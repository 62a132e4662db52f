"""A base model without tensors: every adapter's weights hold one number, and its answers are that letter.

So the text of an answer says which weights really ran, whatever its headers say.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.core.batch import Batch, Row, RowAdapter, RowOutput, SlotRef
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.model.build import ModelParts
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import byte_level_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BASE_LETTER, MIXED, EMPTY = ".", "?", "!"  # no adapter; what it read was written by others; nothing in the slot
LAYERS, HIDDEN, MAX_LEN = 2, 4, 20_000
BLOCK_SIZE, NUM_BLOCKS = 16, 8000
PATH = "model.layers.{}.self_attn.q_proj"
_PAUSE = 0.004  # seconds of a step in which only held rows run

TEXT = TextModel(byte_level_tokenizer())
_EOS = TEXT.encode("<|end|>", add_special_tokens=False)[0]
_TOKENS = {letter: TEXT.encode(letter, add_special_tokens=False)[0] for letter in LETTERS + BASE_LETTER + MIXED + EMPTY}


def write_adapter(folder: Path, content: int) -> Path:
    """A PEFT folder whose weights say `content`."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(LAYERS):
        path = f"base_model.model.{PATH.format(layer)}"
        tensors[f"{path}.lora_A.weight"] = torch.full((1, HIDDEN), float(content + 1))
        tensors[f"{path}.lora_B.weight"] = torch.ones(HIDDEN, 1)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@dataclass(frozen=True)
class Letter:
    """An adapter in host memory."""

    digest: str
    letter: str
    rank: int = 1
    num_bytes: int = 100
    extra_bytes: int = 0
    is_plain: bool = False  # of letters nothing is kept at hand


def fold(saved: SavedAdapter) -> Letter:
    """The letter that every layer's weights agree on."""
    (number,) = {float(linear.a.max()) for linear in saved.linears.values() if linear.a is not None}
    return Letter(saved.digest, LETTERS[int(number) - 1])


@dataclass
class LetterRunner:
    """Answers with what lies in the slot at that moment, whoever owns it: that it is the right one is not for it to
    say. A row with a seed goes on for as long as the seed is in `held`.
    """

    held: set[int]
    slots: dict[int, str] = field(default_factory=dict)
    _written: dict[int, str] = field(default_factory=dict)  # by KV block

    def load_slot(self, slot: SlotRef, adapter: Letter) -> None:
        self.slots[slot.index] = adapter.letter

    def clear_slot(self, index: int) -> None:
        self.slots.pop(index, None)

    def run(self, batch: Batch) -> list[RowOutput]:
        if all(self._is_held(row) for row in batch.rows):
            threading.Event().wait(_PAUSE)
        return [self._row(row) for row in batch.rows]

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        return SmokeTestResult(1.0, 0.0, 1.0)

    def _row(self, row: Row) -> RowOutput:
        letter = self.slots.get(row.adapters[0].slot.index, EMPTY) if row.adapters else BASE_LETTER
        last = row.start + len(row.token_ids) - 1
        for number in range(row.start // BLOCK_SIZE, last // BLOCK_SIZE + 1):
            self._written[row.block_table[number]] = letter
        if any(self._written[block] != letter for block in row.block_table):
            letter = MIXED
        if row.sample is None:
            return RowOutput(row.sequence_id, None)
        is_over = row.sample.params.seed is not None and not self._is_held(row)
        return RowOutput(row.sequence_id, _EOS if is_over else _TOKENS[letter])

    def _is_held(self, row: Row) -> bool:
        return row.sample is not None and row.sample.params.seed in self.held


def letter_parts(runner: LetterRunner) -> ModelParts:
    """What `build_model` would give, for this runner."""
    linears = {PATH.format(layer): LinearShape(HIDDEN, HIDDEN) for layer in range(LAYERS)}
    spec = ModelSpec(
        "letters", "LlamaForCausalLM", TEXT.vocab_size, MAX_LEN, (_EOS,), LAYERS, linears, 0, "float32", "cpu"
    )
    return ModelParts(spec, runner, NUM_BLOCKS, fold, lambda saved, init: saved)
