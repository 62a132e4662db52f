"""docs/explanation/reliability.md states each limit with the default that the setting has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lora_serve.core.setting_groups.http import ConnectionLimits, RequestLimits
from lora_serve.core.settings import Settings

PAGE = (Path(__file__).parents[1] / "docs" / "explanation" / "reliability.md").read_text()
SHOWN = re.findall(r"\| `([a-z_0-9/]+\.py)` `(test_\w+)` \|$", PAGE, re.M)
ROWS = {name.replace("-", "_"): default for name, default in re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", PAGE, re.M)}


def test_every_limit_of_connections_and_requests_is_stated() -> None:
    limits = {field.name for field in (*fields(ConnectionLimits), *fields(RequestLimits))}
    limits |= {"max_body_size", "max_upload_size"}
    assert limits <= set(ROWS)


def test_every_stated_default_is_the_settings_own() -> None:
    for name, stated in ROWS.items():
        default = Settings.model_fields[name].default
        assert default is None or float(stated) == float(default), name


def test_the_page_has_its_place_for_figures() -> None:
    from benchmarks.reliability.page import BEGIN, END

    assert PAGE.index(BEGIN) < PAGE.index(END)


def test_at_least_thirty_faults_are_listed_each_with_a_test_that_exists() -> None:
    assert len(SHOWN) >= 30
    for file, name in SHOWN:
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), name


def test_every_row_of_faults_names_its_test() -> None:
    section = PAGE.partition("## Faults")[2].partition("\n## ")[0]
    assert section.count("\n| ") == len(SHOWN) + 1, "a row names no test, or not in this way"
