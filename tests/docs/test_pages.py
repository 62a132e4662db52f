"""How the blocks of a page are read and run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import blocks, expected, missing, program

PAGE = """\
# A page

```bash
greeting=hello
```

<!-- test: skip, needs a moon -->
```bash
exit 1
```

<!-- test: fails -->
```bash
echo $greeting; false; echo unseen
```

<!-- output -->
```text
hel...
```

```yaml
not: run
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_blocks_have_language_mark_and_text(page: Path) -> None:
    found = blocks(page)
    assert [(block.language, block.mark) for block in found] == [
        ("bash", ""),
        ("bash", "test: skip, needs a moon"),
        ("bash", "test: fails"),
        ("text", "output"),
        ("yaml", ""),
    ]
    assert [block.is_run for block in found] == [True, False, True, False, False]
    assert list(expected(found)) == [(2, "hel...\n")]


def run(page: Path) -> int:
    out = page.parent / "out"
    out.mkdir(exist_ok=True)
    command = ["bash", "-c", program(blocks(page), 1, 2)]
    return subprocess.run(command, env={"out": str(out), "PATH": "/usr/bin:/bin"}, timeout=20, check=False).returncode


def test_blocks_share_variables_and_stop_at_the_first_failure(page: Path) -> None:
    assert run(page) == 0
    assert (page.parent / "out" / "2").read_text() == "hello\n"
    page.write_text(PAGE.replace("false; ", ""))
    assert run(page) == 92
    page.write_text(PAGE.replace("greeting=hello", "false\ntrue"))
    assert run(page) == 1


def test_mark_that_is_not_known_is_an_error(page: Path) -> None:
    page.write_text(PAGE.replace("test: fails", "test: perhaps"))
    with pytest.raises(ValueError, match="perhaps"):
        program(blocks(page), 1, 2)


def test_missing_piece_is_told_and_order_counts() -> None:
    assert missing("one\ntwo three\n", "one\ntw...ree") is None
    assert missing("one\ntwo three\n", "two\none") == "one"
