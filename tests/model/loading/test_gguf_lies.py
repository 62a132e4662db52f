"""GGUF files that lie, or say what is not known here, are refused in words before anything is served."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from lora_serve.app.early_checks import check_start
from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.gguf_file import read_gguf
from lora_serve.core.settings import Settings, check_folders
from lora_serve.model.exactness import try_base
from lora_serve.model.loading.frozen_model import check_nothing_missing, load_frozen
from lora_serve.text.tokenizer import TextModel
from tests.gguf_packer import save_gguf
from tests.oracle import save_tiny_model

HUGE = struct.pack("<Q", 1 << 60)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture(scope="module")
def sound(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(llama, tmp_path_factory.mktemp("sound"), "Q8_0")[0]


def part_of(model: Path) -> ModelConfig:
    return Settings(model=str(model), dtype="float32").part(ModelConfig)


def load(model: Path) -> None:
    check_nothing_missing(str(model), load_frozen(part_of(model), AutoModelForCausalLM).missing)


def behind(key: bytes, skipped: int, new: bytes) -> Callable[[bytes], bytes]:
    """Other bytes so many bytes behind a word of the header."""

    def change(data: bytes) -> bytes:
        place = data.index(key) + len(key) + skipped
        return data[:place] + new + data[place + len(new) :]

    return change


# what becomes of the bytes, words of the refusal
BYTES: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "another magic": (lambda x: b"GGML" + x[4:], "does not begin with the letters GGUF"),
    "no bytes": (lambda x: b"", "it is no GGUF file that can be served"),
    "version 1": (lambda x: x[:4] + b"\1\0\0\0" + x[8:], "it is of version 1; served are 2 and 3"),
    "big endian": (lambda x: x[:4] + b"\0\0\0\3" + x[8:], "its numbers are big endian"),
    "too many tensors": (lambda x: x[:8] + HUGE + x[16:], f"would hold {1 << 60} tensors"),
    "too many facts": (lambda x: x[:16] + HUGE + x[24:], f"would hold {1 << 60} facts"),
    "a key too long": (lambda x: x[:24] + HUGE + x[32:], "it ends within its header"),
    "a text too long": (behind(b"general.architecture", 4, HUGE), "it ends within its header"),
    "too many words": (behind(b"tokenizer.ggml.tokens", 8, HUGE), f"would hold {1 << 60} texts of tokenizer"),
    "too many kinds of words": (behind(b"tokenizer.ggml.token_type", 8, HUGE), f"{1 << 60} numbers of tokenizer"),
    "lists in a list": (behind(b"tokenizer.ggml.token_type", 4, b"\x09\0\0\0"), "of a type that is not known"),
    "a fact of no type": (behind(b"llama.block_count", 0, b"\x63\0\0\0"), "llama.block_count is of a type"),
    "a key that is no text": (behind(b"", 32, b"\xff\xfe"), "codec can't decode"),
    "a type that is not served": (behind(b"blk.0.attn_q.weight", 20, b"\x0a\0\0\0"), "ggml's type 10; served are F32"),
    "no dimension": (behind(b"blk.0.attn_q.weight", 0, b"\0\0\0\0"), "attn_q.weight has 0 dimensions"),
    "many dimensions": (behind(b"blk.0.attn_q.weight", 0, b"\xff\xff\xff\xff"), "has 4294967295 dimensions"),
    "a huge tensor": (behind(b"blk.0.attn_q.weight", 12, HUGE), "would lie at"),
    "half a block": (behind(b"blk.0.attn_q.weight", 4, b"\x10"), "are no blocks of 32"),
    "an empty tensor": (behind(b"blk.0.attn_q.weight", 12, b"\0"), "are no blocks of 32"),
    "a place outside": (behind(b"blk.0.attn_q.weight", 24, HUGE), "would lie at"),
    "a crooked place": (behind(b"blk.0.attn_q.weight", 24, b"\1"), "would lie at"),
    "two in one place": (behind(b"blk.0.attn_q.weight", 24, bytes(8)), "lie in one place"),
    "two of one name": (lambda x: x.replace(b"blk.0.attn_q.weight", b"blk.0.attn_v.weight"), "two tensors blk.0"),
    "a name without a place": (lambda x: x.replace(b"blk.0.attn_q.", b"blk.0.attn_p."), "it lacks blk.0.attn_q.weight"),
    "a part of no model": (lambda x: x.replace(b"blk.1.attn_v.", b"blk.1.attn_p."), "attn_p.weight has no place"),
    "a layer too many": (lambda x: x.replace(b"blk.1.attn_v.", b"blk.7.attn_v."), "blk.7.attn_v.weight has no place"),
    "a bias of no model": (lambda x: x.replace(b"blk.1.attn_v.weight", b"blk.1.ffn_up.bias\0\0"), "has no place"),
    "the end is cut off": (lambda x: x[:-200], "; the file has"),
}  # fmt: skip


@pytest.mark.parametrize("lie", BYTES)
def test_bytes_that_lie_are_refused_by_a_start_and_by_the_check(lie: str, sound: Path, tmp_path: Path) -> None:
    change, words = BYTES[lie]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(sound.read_bytes()))
    for attempt in (load, lambda model: try_base(part_of(model))):
        with pytest.raises(ModelError, match=rf"--model .*: .*{words}"):
            attempt(file)


def test_file_that_ends_anywhere_is_refused(sound: Path, tmp_path: Path) -> None:
    data, file = sound.read_bytes(), tmp_path / "model.gguf"
    for length in range(0, len(data), 61):
        file.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_gguf(file, texts=True)


# facts in place of the file's, words of the refusal
FACTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general.architecture": None}, "does not say its general.architecture"),
    "another architecture": ({"general.architecture": "rwkv7"}, "its architecture is 'rwkv7'; of GGUF served are"),
    "an adapter": ({"general.type": "adapter"}, "its general.type is 'adapter', no model"),
    "a part": ({"split.count": 3}, "it is a part of several files: join them first"),
    "an alignment": ({"general.alignment": 33}, "general.alignment is 33"),
    "a fact not known": ({"llama.rope.kind": "spiral"}, "rope.kind is 'spiral', a field not known of GGUF's"),
    "a text for a number": ({"llama.block_count": "two"}, "llama.block_count is 'two'; of GGUF's llama served is"),
    "a whole number for a part": ({"llama.attention.layer_norm_rms_epsilon": 2}, "expected float, got int"),
    "no heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
    "no length": ({"llama.context_length": None}, "llama.context_length is None"),
    "too many layers": ({"llama.block_count": 1 << 20}, "served is a whole number from 1 to 4096"),
    "one layer more": ({"llama.block_count": 3}, "they lack model.layers.2"),
    "one layer less": ({"llama.block_count": 1}, "blk.1.* has no place in the model llama"),
    "heads of another size": (
        {f"llama.attention.{one}_length": 1 << 30 for one in ("key", "value")},
        r"blk.0.attn_q.weight is \[32, 32\], and by its"),
    "values of another size": ({"llama.attention.value_length": 4}, "value_length is 4, and a head has 8 numbers"),
    "half-turned heads": ({"llama.rope.dimension_count": 4}, "dimension_count is 4, and a head has 8 numbers"),
    "another width": ({"llama.embedding_length": 64}, r"token_embd.weight is \[97, 32\], and by its other facts"),
    "other numbers inside": ({"llama.feed_forward_length": 48}, "config.json does not fit the weights"),
    "other words": ({"llama.vocab_size": 98}, r"token_embd.weight is \[97, 32\], and by its other facts \[98, 32\]"),
    "an end beyond the words": ({"tokenizer.ggml.eos_token_id": 97}, "its eos token is 97, and there are 97"),
    "another scaling": ({"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'; of GGUF's llama served"),
    "a scaling by nothing": ({"llama.rope.scaling.type": "linear"}, "no rope.scaling.factor is there"),
    "a scaling by a negative": ({"llama.rope.scaling.factor": -1.0}, "scaling.factor is -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", FACTS)
def test_facts_that_lie_are_refused(lie: str, llama: Path, tmp_path: Path) -> None:
    facts, words = FACTS[lie]
    file, _ = save_gguf(llama, tmp_path, "Q8_0", **facts)
    with pytest.raises(ModelError, match=words):
        load(file)


def test_factors_of_positions_that_nobody_knows_are_refused(llama: Path, tmp_path: Path) -> None:
    file, _ = save_gguf(llama, tmp_path, "Q8_0", factors=np.arange(1, 5, dtype=np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3.1"):
        try_base(part_of(file))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_scales_that_are_no_numbers_are_refused(kind: str, llama: Path, tmp_path: Path) -> None:
    file, _ = save_gguf(llama, tmp_path, kind)
    tensor = read_gguf(file).tensors["blk.1.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.start : tensor.start + 2] = np.float16("nan").tobytes()
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj: its scales have .*infinite or none"):
        load(file)


def test_folder_with_several_files_and_a_part_of_several_are_refused(sound: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.gguf").write_bytes(sound.read_bytes())
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: name one of them, such as .*model-00001-of-00002.gguf"):
        check_folders(Settings(model=str(tmp_path)))
    with pytest.raises(ModelError, match="it is a part of several files"):
        load(tmp_path / "model-00001-of-00002.gguf")


def test_lie_is_told_before_anything_heavy_is_imported(sound: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound.read_bytes()[:900])
    with pytest.raises(ModelError, match="it is no GGUF file that can be served: it would hold 97 texts"):
        check_start(Settings(model=str(file), port=0, store=tmp_path / "store"))
    with pytest.raises(ModelError, match="--max-model-len 4096: this model knows 128 positions"):
        check_start(Settings(model=str(sound), port=0, store=tmp_path / "store", max_model_len=4096))


# facts in place of the tokenizer's, words of the refusal
WORDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "no words": ({"tokenizer.ggml.tokens": None}, "it holds no tokenizer: lay a tokenizer.json beside the file"),
    "a template that is no text": ({"tokenizer.chat_template": 5}, "its chat template is 5"),
    "a word twice": ({"tokenizer.ggml.tokens": ["w", "1", "w1", "w"]}, "4 tokens, of which 3"),
    "kinds of other words": ({"tokenizer.ggml.token_type": [1, 1]}, "another number of their token_type"),
    "another split": ({"tokenizer.ggml.pre": "fancy"}, "split as 'fancy', which is not known: lay a tokenizer.json"),
    "another way": ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    "an end beyond the words": ({"tokenizer.ggml.eos_token_id": 4096}, "it names the token 4096 of 97"),
}  # fmt: skip


@pytest.mark.parametrize("lie", WORDS)
def test_tokenizers_that_lie_are_refused(lie: str, llama: Path, tmp_path: Path) -> None:
    facts, words = WORDS[lie]
    file, _ = save_gguf(llama, tmp_path, "Q8_0", **facts)
    with pytest.raises(ModelError, match=rf"The tokenizer of .* cannot be loaded: .*{words}"):
        TextModel.load(str(file))
