"""What tests of the model share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lora_serve.model.native import compiler
from tests.model.compiled_once import CompiledOnce


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled_once"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_kernels", CompiledOnce(folder))
        yield
