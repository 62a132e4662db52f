"""Finds docstrings that speak of something they do not name, and words that are this project's own dialect.

A public docstring has a subject and a verb, or is a noun phrase that names the thing. So the first sentence of none
begins with a pronoun or a word that needs something named before ("Of ...", "What ...", "It ...", "Whether it ...").

Names, docstrings and titles of pages use the field's terms. A word of DIALECT may stand in no title, and in no more
names and docstrings than it still does: who renames one lowers its number.

    scripts/docstrings.py [PATH ...]        default: lora_serve; exit status 1 if any is found
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PRONOUN = r"It|Its|They|Their|Them|He|She|His|Her|Both|Either|Either's|Neither"
_QUESTION = (
    r"Of|What|Whatever|Who|Whoever|Whose|Whether (it|they|this|that|these|those)|(True|False) (if|when) (it|they)"
)
_POINTING = r"(This|That|These|Those) (is|are|was|were|may|must|can|has|have)"
NEEDS_A_NAME = re.compile(rf"({_PRONOUN}|{_QUESTION}|{_POINTING})\b")

# word: the field's terms; how many names (of classes, functions and arguments) and how many docstrings still have it;
# None: any number, as it is plain English in a sentence
DIALECT: dict[str, tuple[str, int, int | None]] = {
    "allowance": ("quota, budget", 0, 0),
    "errand": ("task, request", 0, 0),
    "fate": ("outcome", 2, 0),
    "habits": ("n-gram cache", 0, 0),
    "look": ("view, snapshot, read", 7, None),
    "news": ("changes, updates", 0, 0),
    "nobody": ("no client, no request, none", 0, 10),
    "room": ("capacity, free bytes", 6, None),
    "told": ("reported, sent", 1, None),
    "way": ("path, route, upstream", 2, None),
    "whoever": ("the client that, the caller that", 0, 0),
}
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TITLE = re.compile(r"^#+ (.+)$", re.M)
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> Iterator[ast.Module | Definition]:
    """The module and all its public classes, functions and methods, nested classes included."""
    yield tree
    waiting: list[ast.Module | ast.ClassDef] = [tree]
    while waiting:
        for node in waiting.pop().body:
            if isinstance(node, Definition):
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


def dialect(sources: Iterable[Path], pages: Iterable[Path]) -> Iterator[str]:
    """One line per place of a word of DIALECT that stands in more places than it may."""
    names: dict[str, list[str]] = {word: [] for word in DIALECT}
    docstrings: dict[str, list[str]] = {word: [] for word in DIALECT}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Definition | ast.arg):
                name = node.arg if isinstance(node, ast.arg) else node.name
                for word in DIALECT.keys() & {part.lower() for part in _PART.findall(name)}:
                    names[word].append(f"{path}:{node.lineno}: {name}")
            if isinstance(node, ast.Module | Definition):
                for word in _words(ast.get_docstring(node) or ""):
                    docstrings[word].append(f"{path}:{getattr(node, 'lineno', 1)}: `{word}` in a docstring")
    for word, (terms, num_names, num_docstrings) in DIALECT.items():
        for places, limit in ((names[word], num_names), (docstrings[word], num_docstrings)):
            if limit is not None and len(places) > limit:
                yield from places
                yield f"`{word}` stands in {len(places)} of these, {limit} at most: say {terms}"
    for page in pages:
        for title in _TITLE.findall(_FENCED.sub("", page.read_text())):
            yield from (f"{page}: `{word}` in the title {title!r}: say {DIALECT[word][0]}" for word in _words(title))


def _words(text: str) -> list[str]:
    """The words of DIALECT in a sentence, but for those that are plain English there."""
    return [word for word in re.findall(r"[a-z]+", text.lower()) if word in DIALECT and DIALECT[word][2] is not None]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Prints what is found in the files and folders of the command line, and in the titles of the pages."""
    given = sys.argv[1:] if arguments is None else arguments
    places = [Path(place) for place in given or [root / "lora_serve"]]
    sources = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    unnamed = [fault for path in sources for fault in faults(path)]
    ours = list(dialect(sources, pages))
    if unnamed:
        unnamed.append(f"{len(unnamed)} docstrings speak of something that they do not name")
    print("\n".join([*unnamed, *ours]))
    return 1 if unnamed or ours else 0


if __name__ == "__main__":
    sys.exit(main())
