"""The process that acts and dies, under the library of crash points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest
from tests.crashes.crashing import Actor, actor, compiled
from tests.stateful.letters import LETTERS, write_adapter
from tests.stateful.test_lost_catalogs import LAYER, NUM_CONTENTS, make_content


@dataclass(frozen=True)
class Victim:
    """The process, the library under which it lives, and what its contents are called."""

    actor: Actor
    library: Path
    digests: list[str]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("crash_points"))


@pytest.fixture(scope="module")
def victim(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    root = tmp_path_factory.mktemp("contents")
    folders = [make_content(root / str(number), number) for number in range(NUM_CONTENTS)]
    with actor(library, "living_process.py", json.dumps({LAYER: [16, 16]}), *folders) as process:
        yield Victim(process, library, [adapter_digest(folder) for folder in folders])


@pytest.fixture(scope="module")
def web(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Whole servers; their contents are others."""
    root = tmp_path_factory.mktemp("letters")
    folders = [write_adapter(root / LETTERS[number], number) for number in range(NUM_CONTENTS)]
    with actor(library, "serving_process.py", root) as process:
        yield Victim(process, library, [adapter_digest(folder) for folder in folders])
