"""Ten alarms, each with an entry of the runbook; by night Prometheus' own tool plays stories to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendering import DEPLOY, ROOT

FILE = DEPLOY / "prometheus" / "alerts.yaml"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
STORIES = Path(__file__).with_name("alarms.yaml")


def test_there_are_ten_and_the_runbook_has_an_entry_for_each() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) == 10
    assert re.findall(r"^### (LoraServe\w+)$", PAGE, re.M) == names
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook_url"] == f"docs/deploy.md#{rule['alert'].lower()}"


def test_each_alarm_is_of_this_job_alone() -> None:
    """The chart narrows it further to a release."""
    for rule in RULES:
        names = re.findall(r"\b(?:up|(?:vllm:|lora_serve_)\w+)\b", rule["expr"])
        assert len(names) == rule["expr"].count('{job="lora-serve"'), rule["alert"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_entry_of_the_runbook_says_what_it_means_and_what_to_do(rule: dict[str, str]) -> None:
    (entry,) = re.findall(rf"^### {rule['alert']}$(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert "**Means**" in entry
    assert "**Do**" in entry


def test_each_alarm_has_a_story_in_which_it_rings_and_one_in_which_it_does_not() -> None:
    stories = yaml.safe_load(STORIES.read_text())["tests"]
    cases = [case for story in stories for case in story["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in stories[0]["alert_rule_test"] if not case["exp_alerts"]} == names


@pytest.mark.nightly
def test_alarms_ring_when_they_should() -> None:
    """promtool: Debian's package prometheus has it; scripts/test --nightly puts it beside Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (["check", "rules", str(FILE)], ["test", "rules", str(STORIES)]):
        done = subprocess.run(
            ["promtool", *command],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
