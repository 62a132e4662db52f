"""The checks before the model loads: what is missing is said in words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lora_serve.app.early_checks import check_start
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings


@pytest.mark.parametrize(
    ("package", "flags", "extra"),
    [
        ("redis", {"redis_url": "redis://localhost:6379/0"}, "redis"),
        ("torchao", {"quantization": "int8"}, "quantization"),
    ],
)
def test_missing_package_is_named_with_its_extra(
    package: str, flags: dict[str, str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "lora_serve.adapters.redis_connection", raising=False)
    settings = Settings(model=str(tmp_path), store=tmp_path / "store", port=0, **flags)
    with pytest.raises(ConfigError, match=rf"--{next(iter(flags)).replace('_', '-')}.*'lora-serve\[{extra}\]'"):
        check_start(settings)
