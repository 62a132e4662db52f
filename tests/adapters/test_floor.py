from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "catalog.catalog",
    "checkpoint.peft_config",
    "checkpoint.artifact",
    "archives.unpacking",
    "sources.folder",
    "sources.table",
    "stores.disk",
]


@pytest.mark.parametrize("modules", [[*TORCH_FREE, "stores.redis", "stores.tiered"]])
def test_what_the_engine_and_the_doors_import_brings_no_torch(modules: list[str]) -> None:
    names = [f"lora_serve.adapters.{module}" for module in modules]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
