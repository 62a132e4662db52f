"""Finds docstrings that speak of something they do not name.

A public docstring has a subject and a verb, or is a noun phrase that names the thing. So the first sentence of none
begins with a pronoun or a word that needs something named before ("Of ...", "What ...", "It ...", "Whether it ...").

    scripts/docstrings.py [PATH ...]        default: lora_serve; exit status 1 if any is found
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PRONOUN = r"It|Its|They|Their|Them|He|She|His|Her|Both|Either|Either's|Neither"
_QUESTION = (
    r"Of|What|Whatever|Who|Whoever|Whose|Whether (it|they|this|that|these|those)|(True|False) (if|when) (it|they)"
)
_POINTING = r"(This|That|These|Those) (is|are|was|were|may|must|can|has|have)"
NEEDS_A_NAME = re.compile(rf"({_PRONOUN}|{_QUESTION}|{_POINTING})\b")


def documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module and all its public classes, functions and methods, nested classes included."""
    yield tree
    waiting: list[ast.Module | ast.ClassDef] = [tree]
    while waiting:
        for node in waiting.pop().body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("_") or node.name == "__init__":
                    yield node
                if isinstance(node, ast.ClassDef):
                    waiting.append(node)


def faults(path: Path) -> Iterator[str]:
    """One line per docstring that begins with nothing named: place, name and the sentence's beginning."""
    for node in documented(ast.parse(path.read_text())):
        text = ast.get_docstring(node)
        if text and NEEDS_A_NAME.match(text):
            line = getattr(node, "lineno", 1)
            yield f"{path}:{line}: {getattr(node, 'name', 'module')}: {text.splitlines()[0][:80]}"


def main() -> int:
    """Prints what is found in the files and folders of the command line."""
    found = [
        fault
        for place in map(Path, sys.argv[1:] or ["lora_serve"])
        for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
        for fault in faults(path)
    ]
    print("\n".join([*found, f"{len(found)} docstrings speak of something that they do not name"] if found else []))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
