"""Which source a text goes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint.content import SIDE_NAMES
from lora_serve.adapters.sources import table
from lora_serve.adapters.sources.base import Intake, OnBytes
from lora_serve.adapters.sources.table import MAX_LENGTH, SourceTable, build_sources
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    ConfigError,
    InvalidAdapterError,
    InvalidRequestError,
    PayloadTooLargeError,
)


class Echo:
    """Gives what it was asked for as its words."""

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (target / name).write_bytes(b"x")
        return source


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_scheme_decides_whatever_its_case(target: Path) -> None:
    sources = SourceTable({"": Echo(), "x+y": Echo()})
    for source in ("X+Y://a", "x+y://", "a/b", "/a", "a:b", "x+y:/a"):
        assert sources.fetch(source, target, 1) == source


@pytest.mark.parametrize(
    "source", ["file:///etc", "local://a", "memory://a", "simplecache::s3://b/a", "sftp://h/a", "S4://b/a"]
)
def test_unknown_scheme_is_refused_with_those_that_are_known(config: AdapterConfig, target: Path, source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"hf://, http://, https://, redis://, s3://|allowed root") as caught:
        build_sources(config).fetch(source, target, 1)
    assert caught.value.param == "source"
    assert not target.exists()


@pytest.mark.parametrize("source", ["hf://org/repo\n", "hf://org/repo ", "hf://org/\x7f", "hf://" + "a" * MAX_LENGTH])
def test_text_that_no_source_would_write_is_refused(config: AdapterConfig, target: Path, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="`source`") as caught:
        build_sources(config).fetch(source, target, 1)
    assert caught.value.param == "source"


def test_source_that_brings_too_little_is_refused_here(target: Path) -> None:
    class Nothing(Echo):
        def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
            return source

    with pytest.raises(InvalidAdapterError, match="missing"):
        SourceTable({"": Nothing()}).fetch("a", target, 1)
    assert not target.exists()


def test_disk_that_is_full_is_not_the_callers_mistake(target: Path) -> None:
    class Full(Echo):
        def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
            raise OSError(28, "No space left on device", str(target))

    with pytest.raises(AdapterUnavailableError) as caught:
        SourceTable({"": Full()}).fetch("a", target, 1)
    assert str(target) not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "flag"), [({"adapter_url": ("ftp://a",)}, "--adapter-url"), ({"redis_url": "http://a"}, "--redis-url")]
)
def test_wrong_setting_is_told_when_the_table_is_built(
    config: AdapterConfig, change: dict[str, object], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        build_sources(replace(config, **change))  # type: ignore[arg-type]


def test_every_file_of_a_source_is_in_the_table(config: AdapterConfig) -> None:
    files = {path.stem for path in Path(table.__file__).parent.glob("*.py")} - {"__init__", "base", "table"}
    files -= {"connections"}
    used = {type(source).__module__.rpartition(".")[2] for source in build_sources(config)._sources.values()}
    assert used == files


@pytest.mark.parametrize("name", SIDE_NAMES)
def test_too_large_a_file_beside_the_adapter_is_left_empty_and_the_rest_taken(target: Path, name: str) -> None:
    intake = Intake(target, 100)
    intake.take("adapter_config.json", [b"x" * 50, b"x" * 50])
    intake.take_side(name, [b"y"])
    assert (target / name).read_bytes() == b""
    with pytest.raises(PayloadTooLargeError, match="100 bytes"):
        intake.take("adapter_model.safetensors", [b"x"])
