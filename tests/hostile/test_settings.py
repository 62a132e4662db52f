"""Flags, environment and YAML that make no sense: exit code 2, one line that names the flag, before a model loads.

The first of them are in tests/test_cli.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import load_settings


@pytest.fixture
def watched() -> None:
    """No server here, so no canaries."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


FLAGS: dict[str, list[str]] = {
    "port_negative": ["--port", "-1"],
    "port_words": ["--port", "eighty"],
    "port_fraction": ["--port", "80.5"],
    "port_unicode": ["--port", "\u0668\u0660\u0660\u0660x"],
    "queue_zero": ["--max-queue", "0"],
    "rank_huge": ["--max-lora-rank", "100000"],
    "slots_negative": ["--max-loras", "-4"],
    "rows_huge": ["--max-num-seqs", "1000000"],
    "memory_words": ["--adapter-memory", "lots"],
    "memory_negative": ["--adapter-host-memory", "-1GiB"],
    "memory_nan": ["--kv-cache-memory", "nan"],
    "memory_infinite": ["--kv-cache-memory", "infGiB"],
    "timeout_nan": ["--shutdown-timeout", "nan"],
    "timeout_negative": ["--shutdown-timeout", "-1"],
    "keep_alive_zero": ["--keep-alive-timeout", "0"],
    "keep_alive_nan": ["--keep-alive-timeout", "nan"],
    "body_zero": ["--body-timeout", "0"],
    "write_negative": ["--write-timeout", "-5"],
    "connections_few": ["--max-connections", "1"],
    "header_tiny": ["--max-header-size", "10"],
    "n_zero": ["--max-n", "0"],
    "stop_zero": ["--max-stop", "0"],
    "stop_length_huge": ["--max-stop-length", "9999999999"],
    "logprobs_negative": ["--max-logprobs", "-2"],
    "prompts_zero": ["--max-prompts", "0"],
    "key_short": ["--admin-key", "x"],
    "auth_word": ["--auth", "maybe"],
    "policy_path": ["--policy", "../../evil"],
    "kernel_path": ["--lora-kernel", "os.system"],
    "module_without_path": ["--lora-modules", "a"],
    "module_trick": ["--lora-modules", "../../a=/etc"],
    "module_json": ["--lora-modules", '{"name": 1}'],
    "root_missing": ["--adapter-root", "/no/such/folder"],
    "weight_words": ["--tenant-weight", "acme=heavy"],
    "weight_negative": ["--tenant-weight", "acme=-1"],
    "weight_nan": ["--tenant-weight", "acme=nan"],
    "redis_prefix_empty": ["--redis-prefix", ""],
    "unknown": ["--trust-everything", "yes"],
    "abbreviated": ["--max-lor", "4"],
    "twice": ["--port", "1", "--port", "x"],
}


@pytest.mark.parametrize("name", FLAGS)
def test_flag_that_makes_no_sense_is_refused_by_name(model: Path, name: str) -> None:
    flags = FLAGS[name]
    with pytest.raises(ConfigError, match=flags[0]):
        load_settings(["--model", str(model), *flags])


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LORA_SERVE_PORT", "tcp://10.0.0.1:80"),
        ("LORA_SERVE_MAX_N", "many"),
        ("LORA_SERVE_MAX_CONNECTIONS", "-1"),
        ("LORA_SERVE_WRITE_TIMEOUT", "soon"),
        ("LORA_SERVE_ADAPTER_MEMORY", "{{7*7}}"),
        ("LORA_SERVE_LORA_MODULES", "$(id)"),
    ],
)
def test_environment_that_makes_no_sense_is_refused(
    model: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="--" + variable.removeprefix("LORA_SERVE_").lower().replace("_", "-")):
        load_settings(["--model", str(model)])


YAML = {
    "object": "port: !!python/object/apply:os.system [id]\n",
    "tuple": "model: !!python/tuple [1]\n",
    "bomb": "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nport: *c\n",
    "list": "- a\n",
    "number": "5\n",
    "unknown": "prot: 1\n",
    "nested": "port: {a: 1}\n",
    "twice_wrong": "port: 1\nport: x\n",
    "binary": "\x00\x01",
    "unfinished": "port: [",
    "many_documents": "port: 1\n---\nport: 2\n",
    "null_byte_key": '"po\\0rt": 1\n',
    "deep": "[" * 5000,
}


@pytest.mark.parametrize("name", YAML)
def test_settings_file_that_makes_no_sense_is_refused(model: Path, name: str) -> None:
    file = model / "settings.yaml"
    file.write_text(YAML[name])
    with pytest.raises(ConfigError):
        load_settings(["--model", str(model), "--config", str(file)])


def test_settings_file_that_is_no_text_or_endless_is_refused(model: Path) -> None:
    (model / "bytes.yaml").write_bytes(b"\xff\xfe\x80")
    for file in (model / "bytes.yaml", model, Path("/dev/zero")):
        with pytest.raises(ConfigError):
            load_settings(["--model", str(model), "--config", str(file)])
