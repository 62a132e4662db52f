"""benchmarks/results/README.md lists what lies beside it, and every figure has a processor."""

from __future__ import annotations

import re

from benchmarks.report import RESULTS
from benchmarks.results_page import COUNTS, PAGE, processors


def rows() -> dict[str, list[str]]:
    """File -> processor, day, command."""
    found = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in found}


def test_every_file_is_listed_and_every_listed_file_is_there() -> None:
    data = {file.name for file in RESULTS.iterdir() if file.suffix == ".json"}
    pictures = {file.name for file in RESULTS.iterdir() if file.suffix == ".png"}
    others = {file.name for file in RESULTS.iterdir()} - data - pictures
    assert set(rows()) == data
    assert {name.removesuffix(".png") for name in pictures} <= {name.removesuffix(".json") for name in data}
    assert others == {PAGE.name}


def test_every_file_with_times_names_its_processor_and_the_page_says_the_same() -> None:
    listed = rows()
    for name, cpu in processors():
        assert (cpu is None) == (name in COUNTS), name
        assert listed[name][0].startswith(cpu or "any: checks"), name


def test_every_row_tells_a_day_and_a_command() -> None:
    for name, (_, day, command) in rows().items():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d(, commit [0-9a-f]+\+?)?", day), name
        assert re.fullmatch(r"`\S.*`", command), name
