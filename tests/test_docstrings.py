"""scripts/docstrings.py: docstrings name what they speak of, in the field's terms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "scripts" / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in which nothing is found."""
    for folder in ("lora_serve", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# A server\n\nNobody waits.\n\n```bash\n# nobody\n```\n")
    (tmp_path / "lora_serve" / "module.py").write_text('"""The queue of requests."""\n')
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("lora_serve/new.py", "class Habits: ...\n", "new.py:1: Habits"),
        ("lora_serve/new.py", "def run(an_errand: str) -> None: ...\n", "new.py:1: an_errand"),
        (
            "lora_serve/new.py",
            '"""A queue.\n\nIts length is an allowance."""\n',
            "new.py:1: `allowance` in a docstring",
        ),
        ("lora_serve/new.py", '"""It is a queue."""\n', "1 docstrings speak of something that they do not name"),
        ("docs/new.md", "# A page\n\n## Whoever comes first\n", "`whoever` in the title 'Whoever comes first'"),
    ],
)
def test_word_of_our_own_is_found(
    docstrings: ModuleType, project: Path, file: str, text: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docstrings.main([], project) == 0
    (project / file).write_text(text)
    assert docstrings.main([], project) == 1
    assert found in capsys.readouterr().out


def test_word_that_is_still_here_becomes_no_more_frequent(
    docstrings: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "lora_serve" / "new.py").write_text("def has_news(news: str) -> None: ...\n")
    monkeypatch.setitem(docstrings.DIALECT, "news", ("changes", 2, 0))
    assert docstrings.main([], project) == 0
    monkeypatch.setitem(docstrings.DIALECT, "news", ("changes", 1, 0))
    assert docstrings.main([], project) == 1
