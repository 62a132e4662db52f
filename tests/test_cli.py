"""The command line: mistakes are told in one line, early, with exit code 2."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lora_serve import __version__
from lora_serve.adapters.stores.files import lock_store
from lora_serve.cli import main
from lora_serve.core.config import EngineConfig, ServerConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings, load_settings


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that looks like a model, and an environment without settings."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORA_SERVE_{name.upper()}", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """In place of the real wiring, which would load a model."""
    calls = types.SimpleNamespace(settings=None, error=None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORA_SERVE_PORT", "0")

    def serve(settings: Settings, notes: Sequence[str]) -> int:
        calls.settings, calls.notes = settings, notes
        if calls.error:
            raise calls.error
        return 0

    module = types.ModuleType("lora_serve.app.launch")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lora_serve.app.launch", module)
    monkeypatch.setattr("lora_serve.app.launch", module, raising=False)
    return calls


def test_ctrl_c_during_a_start_is_one_word_and_130(
    model: str, launch: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.error = KeyboardInterrupt()
    assert main(["serve", model]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_flags_win_over_the_environment_and_the_environment_over_the_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 3\nmax_loras: 3\nport: 3\nhost: 0.0.0.0\n")
    monkeypatch.setenv("LORA_SERVE_MAX_LORAS", "2")
    monkeypatch.setenv("LORA_SERVE_PORT", "2")
    settings = load_settings(["--model", model, "--config", str(file), "--port", "1"])
    assert (settings.port, settings.max_loras, settings.max_num_seqs, settings.host) == (1, 2, 3, "0.0.0.0")


def test_lists_may_be_given_in_every_way(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (one, two, three):
        folder.mkdir()
    flags = ["--model", model, "--adapter-root", str(one), str(two), "--adapter-root", str(three)]
    assert load_settings(flags).adapter_root == (one, two, three)
    monkeypatch.setenv("LORA_SERVE_ADAPTER_ROOT", f"{one},{two}")
    assert load_settings(["--model", model]).adapter_root == (one, two)
    monkeypatch.setenv("LORA_SERVE_ADAPTER_ROOT", f'["{three}"]')
    assert load_settings(["--model", model]).adapter_root == (three,)
    monkeypatch.delenv("LORA_SERVE_ADAPTER_ROOT")
    file = tmp_path / "settings.yaml"
    file.write_text(f"adapter-root:\n  - {one}\n  - {two}\n")
    assert load_settings(["--model", model, "--config", str(file)]).adapter_root == (one, two)


def test_modules_are_read_as_vllm_reads_them(model: str, tmp_path: Path) -> None:
    settings = load_settings(["--model", model, "--lora-modules", f"a={tmp_path}", f"acme/b={tmp_path}"])
    assert settings.lora_modules == (f"a={tmp_path}", f"acme/b={tmp_path}")


@pytest.mark.parametrize(("text", "expected"), [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5g", 15 * 10**8)])
def test_bytes_may_carry_a_unit(model: str, text: str, expected: int) -> None:
    assert load_settings(["--model", model, "--kv-cache-memory", text]).kv_cache_memory == expected


def test_prefix_caching_is_on_unless_flag_environment_or_file_say_no(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_enabled(*flags: str) -> bool:
        return load_settings(["--model", model, *flags]).part(EngineConfig).enable_prefix_caching

    file = tmp_path / "settings.yaml"
    file.write_text("enable-prefix-caching: false\n")
    assert is_enabled()
    assert not is_enabled("--no-enable-prefix-caching")
    assert not is_enabled("--config", str(file))
    assert is_enabled("--config", str(file), "--enable-prefix-caching")
    monkeypatch.setenv("LORA_SERVE_ENABLE_PREFIX_CACHING", "false")
    assert not is_enabled()
    assert is_enabled("--enable-prefix-caching")


def test_bare_on_and_off_in_yaml_are_words(model: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("auth: on\nwarmup: off\n")
    settings = load_settings(["--model", model, "--config", str(file)])
    assert (settings.auth, settings.warmup) == ("on", "off")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], ["--port", "99999", "65535"]),
        (["--port", "http"], ["--port", "http"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots", "512MiB"]),
        (["--max-loras", "0"], ["--max-loras", "'0'", "1"]),
        (["--max-num-batched-tokens", "16"], ["--max-num-batched-tokens", "--max-num-seqs"]),
        (["--max-lora", "4"], ["--max-lora", "did you mean --max-loras?"]),
        (["--frobnicate"], ["--frobnicate", "no such flag"]),
        (["stray"], ["stray"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--lora-modules", "nonsense"], ["--lora-modules", "NAME=PATH", "nonsense"]),
        (["--lora-modules", "../x=/"], ["--lora-modules", "../x"]),
        (["--lora-modules", "a=/does/not/exist"], ["--lora-modules", "/does/not/exist"]),
        (["--adapter-root", "/does/not/exist"], ["--adapter-root", "/does/not/exist"]),
        (["--config", "/does/not/exist.yaml"], ["--config", "/does/not/exist.yaml"]),
        (["--model", "/does/not/exist"], ["--model", "/does/not/exist"]),
        (["--model", "./nowhere"], ["--model", "./nowhere"]),
        (["--model", ""], ["--model"]),
        (["--root-path", "/llm/../x"], ["--root-path", "a path such as /llm", "/llm/../x"]),
        (["--root-path", "llm"], ["--root-path", "a path such as /llm"]),
    ],
)
def test_wrong_setting_is_one_line_that_names_flag_value_and_what_is_allowed(
    model: str, flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str], launch: Any
) -> None:
    line = refused(["serve", "--model", model, *flags], capsys)
    assert all(word in line for word in words), line
    assert launch.settings is None


def test_every_wrong_setting_has_its_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", model, "--port", "x", "--dtype", "y"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_missing_model_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORA_SERVE_MODEL", raising=False)
    assert "--model: is required" in refused(["serve"], capsys)
    assert "holds no config.json" in refused(["serve", "--model", str(tmp_path)], capsys)


def test_wrong_value_from_the_environment_says_where_it_came_from(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SERVE_PORT", "tcp://10.0.0.1:80")
    line = refused(["serve", "--model", model], capsys)
    assert "LORA_SERVE_PORT" in line
    assert "tcp://10.0.0.1:80" in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("port: [", "is not YAML"),
        ("- 1\n", "mapping"),
        ("prot: 1\n", "'prot'"),
        ("config: x\n", "'config'"),
        ("port: abc\n", "--port"),
        ("model: !!python/object/apply:os.system [id]\n", "is not YAML"),
    ],
)
def test_wrong_settings_file_is_told(
    model: str, tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert words in refused(["serve", "--model", model, "--config", str(file)], capsys)


def test_secret_is_never_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hush" not in refused(["serve", "--model", model, "--admin-key", "hush"], capsys)
    assert "hush-hush-hush" not in refused(
        ["serve", "--model", model, "--admin-key", "hush-hush-hush", "--max-num-batched-tokens", "16"], capsys
    )


def test_serve_hands_the_settings_to_the_wiring(model: str, launch: Any) -> None:
    assert main(["serve", "--model", model, "--port", "0"]) == 0
    assert launch.settings.port == 0


def test_model_that_cannot_be_served_exits_with_2(model: str, launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launch.error = ModelError("it is a picture")
    assert "it is a picture" in refused(["serve", "--model", model], capsys)


@pytest.mark.parametrize("arguments", [["fly"], ["demo", "--port", "x"], ["demo", "--twice"]])
def test_unknown_commands_and_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(arguments, capsys)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main([]) == 2


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert " ".join(str(field.description).split())[:30] in shown


def told_early(*arguments: str, cwd: Path) -> str:
    """The words of a real process that ends with 2 before anything heavy is imported: torch alone takes seconds."""
    program = (
        "import sys, time; began = time.process_time(); from lora_serve.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), time.process_time() - began < 2); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)
    assert (done.returncode, done.stdout.strip()) == (2, "[] True"), done.stderr
    return done.stderr


def test_taken_port_locked_store_and_wrong_value_are_told_before_torch_is_imported(model: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, closing(lock_store(tmp_path / "locked")):
        port = str(other.getsockname()[1])
        assert f"--port {port}: cannot listen there" in told_early("--model", model, "--port", port, cwd=tmp_path)
        assert "another server is using" in told_early("--model", model, "--store", "locked", cwd=tmp_path)
        assert "--tenant-source" in told_early("--model", model, "--tenant-source", "ftp", cwd=tmp_path)


def test_kernels_that_the_processor_cannot_run_and_unknown_numbers_are_told_early(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--dtype: Input should be 'auto', 'bfloat16'" in told_early("--model", model, "--dtype", "fp8", cwd=tmp_path)
    monkeypatch.setenv("LORA_SERVE_KERNELS", "avx9")
    assert "LORA_SERVE_KERNELS=avx9: not one of generic, avx2" in told_early("--model", model, cwd=tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "a=no-adapter"], "holds no adapter_config.json"),
        (["--lora-modules", "model=no-adapter"], "is the base model's name"),
        (
            ["--lora-modules", "a=labels", "b=wide", "--max-lora-rank", "16"],
            "rank 64 is larger than --max-lora-rank 16",
        ),
        (["--served-model-name", "m", "n", "--lora-modules", "n=no-adapter"], "is the base model's name"),
        (["--ssl-certfile", "pem"], "--ssl-certfile: pem"),
        (["--store", "store"], "holds no key"),
        (["--redis-url", "redis://host:port"], "--redis-url: is not redis://"),
        (["--model", "odd"], "cannot be read as JSON"),
        (["--chat-template", "{% for x in %}"], "--chat-template: line 1"),
        (["--chat-template", "no-file.jinja"], "no-file.jinja is neither a file nor a template"),
    ],
)
def test_mistake_that_needs_no_model_to_be_seen_is_told_early(
    model: str, flags: list[str], words: str, tmp_path: Path, launch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no-adapter", "store", "odd", "wide", "labels"):
        (tmp_path / name).mkdir()
    (tmp_path / "pem").write_text("no certificate")
    lora = {"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "wide" / "adapter_config.json").write_text(json.dumps(lora))
    (tmp_path / "labels" / "adapter_config.json").write_text(json.dumps(lora | {"task_type": "SEQ_CLS", "r": 8}))
    (tmp_path / "store" / "admin_key").write_text("short")
    (tmp_path / "odd" / "config.json").write_text("[")
    assert words in refused(["serve", "--model", model, *flags], capsys)
    assert launch.settings is None


def test_module_is_the_command() -> None:
    arguments = [sys.executable, "-m", "lora_serve", "--version"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


def test_load_settings_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="--model"):
        load_settings(["--model", "/does/not/exist"])


def test_models_name_is_its_folders_own_not_its_path(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(["--model", model]).base_name == "model"
    assert load_settings(["--model", f"{model}/"]).base_name == "model"
    monkeypatch.chdir(model)
    assert load_settings(["--model", "."]).base_name == "model"
    assert load_settings(["--model", "../model"]).base_name == "model"
    assert load_settings(["--model", "org/name"]).base_name == "org/name"
    named = load_settings(["--model", model, "--served-model-name", "other"])
    assert (named.base_name, named.part(ServerConfig).other_names) == ("other", frozenset())
    assert load_settings(["--model", "org/name"]).part(ServerConfig).other_names == frozenset()


def test_path_of_the_model_is_another_name_of_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own, which its clients send."""
    monkeypatch.chdir(Path(model).parent.parent)
    relative = str(Path(model).relative_to(Path.cwd()))
    assert "/" in relative
    for given in (relative, f"{relative}/"):
        names = load_settings([given]).part(ServerConfig).other_names
        assert names == {relative, f"{relative}/", model, f"{model}/"}
    monkeypatch.chdir(Path(model).parent)
    names = load_settings(["model"]).part(ServerConfig).other_names
    assert names == {"model/", model, f"{model}/"}, "`model` itself is its name"


def test_model_goes_by_several_names(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LORA_SERVE_SERVED_MODEL_NAME", ""):
        if name:
            monkeypatch.setenv(name, '["a", "b/c"]')
        settings = load_settings([model] if name else [model, "--served-model-name", "a", "b/c"])
        monkeypatch.delenv("LORA_SERVE_SERVED_MODEL_NAME", raising=False)
        assert (settings.base_name, settings.part(ServerConfig).other_names) == ("a", {"b/c"})
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {model}\nserved-model-name: [a, b]\n")
    assert load_settings(["--config", str(file)]).part(ServerConfig).other_names == {"b"}
    file.write_text(f"model: {model}\nserved-model-name: a\n")
    assert load_settings(["--config", str(file)]).base_name == "a"


def test_folder_whose_name_cannot_be_a_models_asks_for_one(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(model).rename(Path(model).with_name("my model"))
    assert "--served-model-name" in refused(["serve", "--model", str(folder)], capsys)
    assert load_settings(["--model", str(folder), "--served-model-name", "m"]).base_name == "m"


def test_help_names_the_unit_of_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    units = dict(re.findall(r"^  --([a-z-]+) ([A-Z]+)", capsys.readouterr().out, re.MULTILINE))
    names = {name.replace("_", "-") for name in Settings.model_fields}
    wrong = {
        name: units[name]
        for name in names & units.keys()
        if (name.endswith("-ms") and units[name] != "MILLISECONDS")
        or (name.endswith(("-timeout", "-seconds")) and units[name] != "SECONDS")
        or (name.endswith(("-memory", "-size", "-space")) and units[name] not in ("BYTES", "N"))
    }
    assert wrong == {}
    assert (units["prompt-stretch"], units["kv-cache-memory"], units["block-size"]) == ("NUMBER", "BYTES", "N")


@pytest.mark.parametrize(
    ("words", "near"),
    [(["adapter", "list"], "adapters"), (["adapters", "lst"], "list"), (["tenants", "creat", "a"], "create"),
     (["registry", "backupp"], "backup"), (["serv"], "serve"), (["--modle", "x"], "serve --model")],
)  # fmt: skip
def test_unknown_command_is_told_with_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"; did you mean {near}?" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["lora_serve", "lora_serve.cli"])
def test_modules_of_the_command_run_it(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nonsense' is no command" in done.stderr
