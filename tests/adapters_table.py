"""What the matrix of architectures and kinds found, as the table in docs/reference/adapters.md, and back again.

Run as a program (scripts/adapters_table) it runs the matrix and rewrites that table.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kind_matrix import BASE, verdicts
from tests.oracle import ARCHITECTURES
from tests.peft_kinds import KINDS
from tests.peft_methods import method_verdicts

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "adapters.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
METHODS = "<!-- methods: begin -->", "<!-- methods: end -->"
_ABOUT = {BASE: "no adapter", **{name: kind.about for name, kind in KINDS.items()}}
Verdicts = Mapping[str, Mapping[str, str]]  # architecture -> kind -> verdict


def shortened(verdict: str) -> str:
    """A verdict as the table tells it: of several reasons the first, without the value that was found."""
    text = verdict.replace("The adapter cannot be served: ", "").replace("|", "/").partition("; ")[0]
    return " ".join(re.sub(r" \(got .*\)$", "", text).split())


def adapters_table(found: Verdicts) -> str:
    """Markdown: a line for each kind, a column for each architecture, reasons as numbered notes below."""
    notes: list[str] = []
    header = ["kind", "what PEFT saved", *found]
    lines = [header, ["---"] * len(header)]
    for kind in next(iter(found.values())):
        cells = [_cell(shortened(by_kind[kind]), notes) for by_kind in found.values()]
        lines.append([f"`{kind}`", _ABOUT[kind], *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([table, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def _cell(verdict: str, notes: list[str]) -> str:
    word, _, reason = verdict.partition(": ")
    if not reason:
        return word
    if reason not in notes:
        notes.append(reason)
    return f"{word} ({notes.index(reason) + 1})"


def read_table(document: str) -> dict[str, dict[str, str]]:
    """The shortened verdicts that a document tells: the inverse of `adapters_table`."""
    text = document.partition(BEGIN)[2].partition(END)[0]
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    header, _, *lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    return {
        architecture: {line[0].strip("`"): _verdict(line[column], notes) for line in lines}
        for column, architecture in enumerate(header)
        if column >= 2
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _verdict(cell: str, notes: Mapping[str, str]) -> str:
    match = re.fullmatch(r"(.*) \((\d+)\)", cell)
    return f"{match[1]}: {notes[match[2]]}" if match else cell


def methods_table(found: Mapping[str, str]) -> str:
    """Markdown: a line for each of PEFT's methods."""
    lines = ["| method | what becomes of it |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {shortened(verdict)} |" for name, verdict in found.items())])


def read_methods(document: str) -> dict[str, str]:
    """The inverse of `methods_table`."""
    text = document.partition(METHODS[0])[2].partition(METHODS[1])[0]
    _, _, *lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1] for line in lines}


def with_table(document: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The document with another table between its markers."""
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def main(architectures: Sequence[str]) -> int:
    """Ask PEFT's methods and the given architectures, or all, anew; others keep theirs. 1 if a verdict is WRONG."""
    with tempfile.TemporaryDirectory() as folder:
        methods = method_verdicts(Path(folder))
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), methods_table(methods), *METHODS))
    if list(architectures) == ["methods"]:
        return any(verdict.startswith("WRONG") for verdict in methods.values())
    found = {} if not architectures else read_table(DOCUMENT.read_text())
    for architecture in architectures or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            found[architecture] = verdicts(architecture, Path(folder))
        print(
            architecture, *sorted({verdict.partition(":")[0] for verdict in found[architecture].values()}), flush=True
        )
    wrong = [f"{a} {kind} {v}" for a, by_kind in found.items() for kind, v in by_kind.items() if v.startswith("WRONG")]
    for line in wrong:
        print(line, file=sys.stderr)
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), adapters_table(found)))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
