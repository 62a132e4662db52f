"""With a compiler, without one, and with one that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_serve.core.errors import ConfigError
from lora_serve.model.attention import create_attention
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.native import compiler, library, packed_linear
from tests.local_engine import LocalEngine
from tests.model.native.conftest import flags_of
from tests.model.tiny import filled_cache
from tests.oracle import save_adapter, save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.forget()
    yield tmp_path / "cache" / "lora_serve"
    library.forget()


@pytest.fixture
def no_compiler(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))


def test_a_file_is_compiled_once_per_machine(empty_cache: Path) -> None:
    assert library.why_not(CPU, torch.float32) is None
    assert [path.name.partition("-")[0] for path in empty_cache.iterdir()] == ["kernels"]
    library.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_kernels", lambda *_: pytest.fail("compiled again"))
        assert library.why_not(CPU, torch.float32) is None


def test_other_flags_are_another_library(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load(torch.float32)
    library.forget()
    monkeypatch.setattr(compiler, "flags", flags_of(("-O0", "-fPIC", "-Wno-psabi")))
    library.load(torch.float32)
    assert len(list(empty_cache.iterdir())) == 2


def test_a_compiler_that_fails_is_told_in_its_own_words_and_asked_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n")
    with broken.open("a") as file:
        file.write("sys.exit('out of vectors')\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    for _ in range(3):
        assert "out of vectors" in str(library.why_not(CPU, torch.float32))
    assert (tmp_path / "calls").read_text() == "x"
    assert list(empty_cache.iterdir()) == []


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torchs_own_operators_are_chosen() -> None:
    assert "no C compiler" in str(library.why_not(CPU, torch.float32))
    assert "no C compiler" in str(packed_linear.why_not(torch.zeros(3, 4)))
    linear = torch.nn.Linear(4, 3)
    frozen, x = FrozenLinear(linear), torch.randn(2, 4)
    assert frozen.packed is None
    assert torch.allclose(frozen(x), linear(x), atol=1e-6)
    assert type(create_attention("auto", filled_cache(4, 4, 2, 8))).__module__.endswith(".sdpa")
    with pytest.raises(ConfigError, match="no C compiler"):
        create_attention("native", filled_cache(4, 4, 2, 8))


def test_without_a_compiler_answers_are_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = {name: save_adapter(model, tmp_path / name, seed=i) for i, name in enumerate("ab")}

    def answers() -> list[tuple[list[int], list[float]]]:
        engine = LocalEngine(
            model, adapters, block_size=4, kv_cache_memory="100KiB", max_num_batched_tokens=16, max_num_seqs=4,
        )  # fmt: skip
        prompts = [([5, 6, 7], None), (list(range(20, 50)), "a"), ([9], "b")]
        found = engine.run([engine.request(p, a, max_tokens=6, logprobs=1, ignore_eos=True) for p, a in prompts])
        return [(one.token_ids, [item.logprob for item in one.logprobs if item is not None]) for one in found]

    native = answers()
    request.getfixturevalue("no_compiler")
    for (tokens, logprobs), (wanted_tokens, wanted) in zip(answers(), native, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted, abs=1e-4)
