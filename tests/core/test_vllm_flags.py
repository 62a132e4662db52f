"""The command lines of vLLM's operators: taken, noted or refused in words, each flag by its row of the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.flags import flag_name
from lora_serve.core.settings import Settings, command_line, load_settings
from lora_serve.core.vllm_table import FLAGS, Fate, Takes, VllmFlag

LEARNED = "the lengths of matches that pay are learned"
OURS = {flag_name(name) for name in Settings.model_fields}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORA_SERVE_{name.upper()}", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def given(flag: VllmFlag, value: str = "x") -> list[str]:
    return [flag.name] if flag.takes is Takes.SWITCH else [flag.name, value]


def test_line_that_an_operator_has_is_taken(model: str, tmp_path: Path) -> None:
    line = (
        f"{model} --enable-lora --max-loras 4 --max_lora_rank 64 --dtype half --max-model-len 4k -tp 1 "
        "--tokenizer-mode auto --max-num-batched-tokens 2K --gpu-memory-utilization 0.9 --swap-space 4 "
        "--api-key one two --enforce-eager "
        "--uvicorn-log-level warning --disable-log-requests --enable-auto-tool-choice --no-enable-prefix-caching "
        "--compilation-config.level 3 -O3 --scheduling-policy priority --runner generate --seed 7"
    ).split()
    modules = ["--lora-modules", f"a={tmp_path}", f'{{"name": "b", "path": "{tmp_path}", "base_model_name": "tiny"}}']
    settings, notes = command_line([*line, *modules, "--allowed-origins", '["https://a.example", "https://b.example"]'])
    assert (settings.model, settings.base_name, settings.max_loras, settings.max_lora_rank) == (model, "tiny", 4, 64)
    assert (settings.dtype, settings.max_model_len, settings.max_num_batched_tokens) == ("float16", 4000, 2048)
    assert (settings.swap_space, settings.gpu_memory_utilization) == (4 * 2**30, 0.9)
    assert (settings.api_key, settings.auth_mode) == (("one", "two"), "on")
    assert (settings.cuda_graphs, settings.compile_layers, settings.enable_prefix_caching) == (False, False, False)
    assert (settings.policy, settings.task, settings.seed) == ("priority", "generate", 7)
    assert settings.lora_modules == (f"a={tmp_path}", f"b={tmp_path}")
    assert settings.allowed_origins == ("https://a.example", "https://b.example")
    assert [note.split()[0] for note in notes] == [
        "--enable-lora", "--uvicorn-log-level", "--disable-log-requests", "--enable-auto-tool-choice",
        "--compilation-config",
    ]  # fmt: skip


@pytest.mark.many(40)
@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_flag_meets_its_fate(model: str, flag: VllmFlag) -> None:
    assert flag.name not in OURS, "a setting of ours is no row of the table"
    match flag.fate:
        case Fate.IGNORED:
            settings, notes = command_line([model, *given(flag, "1")])
            assert settings == load_settings([model])
            assert notes == (f"{flag.name} means nothing here: {flag.why}",)
        case Fate.REFUSED:
            with pytest.raises(ConfigError) as refused:
                load_settings([model, *given(flag)])
            assert flag.name in str(refused.value)
            assert flag.why in str(refused.value)
            for value in flag.harmless:
                assert load_settings([model, f"{flag.name}={value}"]) == load_settings([model])
        case Fate.MEANT:
            assert flag.setting in OURS
            for value in flag.values:
                load_settings([model, *(given(flag) if flag.takes is Takes.SWITCH else [flag.name, value])])


def test_every_flag_of_vllm_0_33_is_known() -> None:
    """The names of `vllm serve` were taken from its engine/arg_utils.py and entrypoints/common/cli_args.py."""
    theirs = Path(__file__).with_name("vllm_flags.txt").read_text().split()
    assert len(theirs) > 300
    assert set(theirs) - {flag.name for flag in FLAGS} - OURS == set()
    assert len({name for flag in FLAGS for name in (flag.name, flag.short) if name}) == sum(
        1 + bool(flag.short) for flag in FLAGS
    )


@pytest.mark.parametrize(
    ("given", "task"),
    [
        (["--runner", "pooling"], "pooling"),
        (["--runner", "pooling", "--convert", "classify"], "classify"),
        (["--convert", "embed", "--runner", "pooling"], "embed"),
        (["--runner", "pooling", "--convert", "none"], "pooling"),
        (["--runner", "auto"], "auto"),
    ],
)
def test_runner_that_pools_is_a_task(model: str, given: list[str], task: str) -> None:
    assert load_settings([model, *given]).task == task


def test_values_of_several_kinds_stand_behind_the_flags_of_0_33(model: str) -> None:
    line = "--numa-bind --numa-bind-nodes 0 1 -ac {} -dpb ray --max-num-queued-reqs 7 --mm-encoder-tp-mode data -pcp 1"
    settings, notes = command_line([model, *line.split()])
    assert settings.max_queue == 7
    assert [note.split()[0] for note in notes] == [
        "--numa-bind", "--numa-bind-nodes", "--attention-config", "--data-parallel-backend", "--mm-encoder-tp-mode",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--tool-parser-plugin x"):
        load_settings([model, "--tool-parser-plugin", "x"])


def test_repository_in_place_of_a_folder_is_pointed_to_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match=r"acme/bot is not a folder .*on the hub it is hf://acme/bot$"):
        load_settings([model, "--lora-modules", "bot=acme/bot"])
    with pytest.raises(ConfigError, match=r"not a folder \(got bot=/no/such/place\)$"):
        load_settings([model, "--lora-modules", "bot=/no/such/place"])


def test_switch_that_is_turned_off_refuses_nothing(model: str) -> None:
    assert load_settings([model, "--no-trust-remote-code"]) == load_settings([model])
    with pytest.raises(ConfigError, match="no code of a checkpoint"):
        load_settings([model, "--trust-remote-code"])


def test_every_refused_flag_has_its_line(model: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings([model, "-tp", "2", "--speculative-config", "{}", "--runner", "draft"])
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "--tensor-parallel-size 2", "--speculative-config {}", "--runner draft",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (['--speculative-config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'], "5"),
        (["-sc", '{"model": "ngram"}'], "auto"),
        (['--speculative-config={"method": "ngram"}', "--speculate", "off"], "off"),
        ([], "auto"),
    ],
)
def test_speculation_by_ngrams_is_taken(model: str, given: list[str], meant: str) -> None:
    assert load_settings([model, *given]).part(EngineConfig).speculate == meant


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"method": "eagle3", "model": "x"}', 'give {"method": "ngram"}'),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 16"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size"),
        ("[]", "a JSON object"),
        ("{", "a JSON object"),
    ],
)
def test_other_speculation_is_refused_in_words(model: str, config: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings([model, "--speculative-config", config])


@pytest.mark.parametrize(
    ("given", "setting", "note"),
    [
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 4}', "--speculate", "off"], "off",
         "--speculative-config means nothing here: --speculate off is given, too"),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 4}', "--speculate", "4"], "4", None),
        (["-sc", '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}'], "auto",
         f"--speculative-config means nothing here in prompt_lookup_max, prompt_lookup_min: {LEARNED}"),
        (["-sc", '{"method": "ngram"}'], "auto", None),
    ],
)  # fmt: skip
def test_what_means_nothing_in_speculation_is_noted(
    model: str, given: list[str], setting: str, note: str | None
) -> None:
    settings, notes = command_line([model, *given])
    assert settings.speculate == setting
    assert notes == (() if note is None else (note,))


def test_number_of_guessed_tokens_has_a_flag_of_ours(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^--num-speculative-tokens 4: .*; use --speculate 4$"):
        load_settings([model, "--num-speculative-tokens", "4"])
    with pytest.raises(ConfigError, match=r"from prompt and earlier answers.*, or --speculate N$"):
        load_settings([model, "-sc", '{"method": "eagle"}'])


@pytest.mark.parametrize("value", ["0", "17", "-1", "on", "true", "4.0"])
def test_unknown_speculation_is_refused_with_what_may_be_given(model: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings([model, f"--speculate={value}"])
    words = "--speculate: expected auto, off or a number of tokens from 1 to 16"
    assert str(refused.value) == f"{words} (got {value!r})"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["stray"], "stray: a second model"),
        (["--quantization", "awq"], "--quantization"),
        (["--max-model-len", "4x"], "--max-model-len"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization"),
        (["--lora-modules", '{"name": "a"}'], '{"name": ..., "path": ...}'),
        (["--lora-modules", '{"name": "a", "path": "/x", "rank": 3}'], '{"name": ..., "path": ...}'),
        (["--lora-modules", "{broken"], "--lora-modules"),
        (["--allowed-origins", '["*"]'], "--allowed-origins"),
        (["--api-key", "with space"], "--api-key"),
        (["--api-key", "key", "--auth", "off"], "--api-key"),
        (["--chat-template", "missing.jinja"], "--chat-template"),
    ],
)
def test_wrong_values_of_vllms_flags_are_told(model: str, flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(["--model", model, *flags])
    assert words in str(refused.value)
    assert "with space" not in str(refused.value)


def test_environment_takes_vllms_json_too(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (f'{{"name": "a", "path": "{tmp_path}"}}', f'[{{"name": "a", "path": "{tmp_path}"}}]', f"a={tmp_path}"):
        monkeypatch.setenv("LORA_SERVE_LORA_MODULES", text)
        assert load_settings([model]).lora_modules == (f"a={tmp_path}",)


def test_vllms_variable_is_a_key_where_no_other_is_given(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs,whole")
    settings, notes = command_line([model])
    assert (settings.api_key, settings.auth_mode) == (("theirs,whole",), "on")
    assert notes == ("VLLM_API_KEY is taken as --api-key",)
    file = tmp_path / "config.yaml"
    file.write_text("api-key: file")
    assert load_settings([model, "--api-key", "flag"]).api_key == ("flag",)
    assert load_settings([model, "--config", str(file)]).api_key == ("file",)
    monkeypatch.setenv("LORA_SERVE_API_KEY", "ours")
    settings, notes = command_line([model])
    assert (settings.api_key, notes) == (("ours",), ())
    monkeypatch.delenv("LORA_SERVE_API_KEY")
    with pytest.raises(ConfigError, match="VLLM_API_KEY"):
        load_settings([model, "--auth", "off"])
    monkeypatch.setenv("VLLM_API_KEY", "with space")
    with pytest.raises(ConfigError, match=r"not shown in VLLM_API_KEY") as refused:
        load_settings([model])
    assert "with space" not in str(refused.value)


def test_file_of_vllms_is_read_too(model: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {model}\nenable-lora: true\nuvicorn_log_level: info\ntensor-parallel-size: 1\nenforce-eager: true\n"
        "trust-remote-code: false\nmax-model-len: 4k\n"
    )
    settings, notes = command_line(["--config", str(file)])
    assert (settings.max_model_len, settings.cuda_graphs, settings.compile_layers) == (4000, False, False)
    assert [note.split()[0] for note in notes] == ["--enable-lora", "--uvicorn-log-level"]
    captured = command_line(["--config", str(file), "--cuda-graphs"])[0]
    assert (captured.cuda_graphs, captured.compile_layers) == (True, False)
    compiled, notes = command_line([model, "--enforce-eager", "--compile-layers"])
    assert (compiled.cuda_graphs, compiled.compile_layers) == (False, True)
    assert notes == ("--enforce-eager means nothing here: --compile-layers on is given, too",)
    file.write_text(f"model: {model}\ntensor-parallel-size: 2\n")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2"):
        load_settings(["--config", str(file)])


def test_help_and_advice_show_our_flags_alone(model: str, capsys: pytest.CaptureFixture[Any]) -> None:
    with pytest.raises(SystemExit):
        load_settings(["--help"])
    shown = capsys.readouterr().out
    assert "--enforce-eager" not in shown
    assert "MODEL" in shown
    with pytest.raises(ConfigError, match=r"--max-lora: there is no such flag; did you mean --max-loras\?"):
        load_settings([model, "--max-lora", "4"])
