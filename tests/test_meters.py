"""The house's meters: a chat's and a registration's way stay short, and what is counted is counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = {  # of each road; lower these when a road gets shorter
    "chat": {"hops": 30, "rooms": 25, "returns": 5, "climbs": 1},
    "registration": {"hops": 28, "rooms": 12, "returns": 16, "climbs": 0},
}
MAX_GENERATORS = 2  # the engine client's, and the one that makes text of events
REPORT = """<testsuites><testsuite>
<testcase classname="tests.text.test_stop" name="a" time="1.25" />
<testcase classname="tests.text.test_stop.TestStops" name="b[.x.]" time="0.5" />
<testcase classname="tests.test_cli" name="c" time="3" />
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("meters") / "report.xml"
    report.write_text(REPORT)
    command = [sys.executable, ROOT / "scripts" / "meters.py", "--tests", report, "--note", "made up"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("road", LONGEST)
def test_road_is_short(found: dict[str, Any], road: str) -> None:
    figures = found["roads"][road]
    counted = [call for call in figures["way"] if call.lstrip()[0].isdigit()]
    assert len(counted) == figures["hops"]
    assert len(figures["climbing"]) == figures["climbs"]
    lengths = {name: figures[name] for name in LONGEST[road]}
    assert all(lengths[name] <= most for name, most in LONGEST[road].items()), (lengths, counted, figures["climbing"])


def test_each_token_of_a_streamed_chat_crosses_two_generators(found: dict[str, Any]) -> None:
    generators = found["roads"]["chat"]["generators_per_token"]
    assert 1 <= len(generators) <= MAX_GENERATORS, generators


def test_registration_visits_the_rooms_in_which_it_is_decided(found: dict[str, Any]) -> None:
    way = "\n".join(found["roads"]["registration"]["way"])
    assert all(room in way for room in ("server/admin/registration.py", "adapters/registration/", "adapters/catalog/"))


def test_sizes_are_those_of_the_folders(found: dict[str, Any]) -> None:
    files = list((ROOT / "lora_serve" / "engine").rglob("*.py"))
    engine = found["sizes"]["folders"]["engine"]
    assert engine["files"] == len(files)
    assert engine["lines"] == sum(len(path.read_text().splitlines()) for path in files)
    assert engine["files_without_init"] == len([path for path in files if path.name != "__init__.py"])
    top = [figures for folder, figures in found["sizes"]["folders"].items() if "/" not in folder]
    assert sum(figures["lines"] for figures in top) <= found["sizes"]["package"]["lines"]


@pytest.mark.parametrize(("kind", "name"), [("settings", "max_cpu_loras"), ("wire_fields", "finish_reason")])
def test_files_per_fact_are_those_that_name_it(found: dict[str, Any], kind: str, name: str) -> None:
    spelled = (name, name.replace("_", "-"))
    files = [path for path in (ROOT / "lora_serve").rglob("*.py") if any(word in path.read_text() for word in spelled)]
    assert 1 < found["facts"][kind]["worst"][name]["python"] <= len(files)
    assert found["facts"][kind]["names"] > 50


def test_seconds_and_tests_per_file_are_those_of_the_report(found: dict[str, Any]) -> None:
    assert found["tests"] == {
        "note": "made up",
        "seconds": 4.8,
        "tests": 3,
        "files": {
            "tests/test_cli.py": {"seconds": 3.0, "tests": 1},
            "tests/text/test_stop.py": {"seconds": 1.75, "tests": 2},
        },
    }
