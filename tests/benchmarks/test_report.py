"""What every report holds, against numbers worked out by hand and by the standard library."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import RESULTS, machine, made_on, percentiles, put_between


def test_percentiles_are_the_median_and_the_tail() -> None:
    seconds = [index / 1000 for index in range(101)]
    assert percentiles(seconds)["p50"] == 1000 * statistics.median(seconds)
    assert percentiles(list(reversed(seconds))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_the_machine_is_named_with_its_cores_and_versions() -> None:
    found = machine()
    assert found["cores"] >= 1
    assert found["versions"]["torch"].startswith("2.")


def test_report_tells_the_day_and_the_commit_that_was_measured() -> None:
    found = machine()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULTS, capture_output=True, text=True, check=False).stdout
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert head.startswith(found["commit"].rstrip("+"))
    assert bool(found["commit"]) == bool(head)


@pytest.mark.nightly
def test_libraries_are_quiet_in_a_benchmark() -> None:
    program = "import benchmarks, torch, torchao; from torch.profiler import profile\nwith profile(): torch.ones(1)"
    found = subprocess.run([sys.executable, "-c", program], cwd=RESULTS.parents[1], capture_output=True, check=True)
    assert (found.stdout, found.stderr) == (b"", b"")


def test_text_between_two_marks_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- a -->\nold\n<!-- b -->\ntail\n")
    put_between(page, "<!-- a -->", "<!-- b -->", "new")
    put_between(page, "<!-- a -->", "<!-- b -->", "newer")
    assert page.read_text() == "head\n<!-- a -->\nnewer\n<!-- b -->\ntail\n"
    with pytest.raises(ValueError, match="has not both"):
        put_between(page, "<!-- a -->", "<!-- c -->", "new")
    assert "newer" in page.read_text()


def test_figures_say_where_when_and_of_what_they_were_made() -> None:
    words = made_on(machine())
    assert words.startswith(f"On {machine()['cores']} cores of ")
    assert machine()["date"] in words
