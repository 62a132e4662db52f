"""What a forge and pre-commit read: well formed, and naming only what is there."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KEYS = {"name", "on", "permissions", "concurrency", "jobs", "env", "defaults"}
JOB_KEYS = {"runs-on", "timeout-minutes", "strategy", "steps", "needs", "if", "env", "permissions"}
STEP_KEYS = {"uses", "with", "run", "if", "name", "env", "id", "shell", "working-directory"}
EVENTS = {"push", "pull_request", "schedule", "workflow_dispatch", "release"}


def load(name: str) -> dict[str, Any]:
    return yaml.load((ROOT / name).read_text(), yaml.BaseLoader)  # `on` stays a text


def test_there_is_a_workflow_for_checks_nightly_wheels_image_and_docs() -> None:
    assert [file.stem for file in WORKFLOWS] == ["checks", "docs", "image", "nightly", "wheels"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_has_the_form_that_the_forge_expects(file: Any) -> None:
    workflow = load(str(file.relative_to(ROOT)))
    assert set(workflow) <= KEYS
    assert {"name", "on", "jobs"} <= set(workflow)
    assert set(workflow["on"]) <= EVENTS
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert set(job) <= JOB_KEYS, name
        assert int(job["timeout-minutes"]) > 0
        assert job.get("needs", name) in workflow["jobs"]
        matrix = job.get("strategy", {}).get("matrix", {})
        assert set(re.findall(r"\${{ matrix\.(\w+) }}", str(job))) <= set(matrix)
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_runs_scripts_that_are_there(file: Any) -> None:
    for script in re.findall(r"(?<!\w)\./([\w./-]+)", file.read_text()):
        assert os.access(ROOT / script, os.X_OK), script
    for path in re.findall(r"docker/Dockerfile[.\w]*", file.read_text()):
        assert (ROOT / path).is_file()


def test_pull_requests_run_the_checks_and_the_default_tier() -> None:
    checks, nightly = load(".github/workflows/checks.yml"), load(".github/workflows/nightly.yml")
    assert "pull_request" in checks["on"]
    assert "./.ci/run" in [step.get("run") for step in checks["jobs"]["test"]["steps"]]
    assert "./scripts/test --nightly" in [step.get("run") for step in nightly["jobs"]["test"]["steps"]]


def test_pre_commit_runs_what_the_check_script_runs() -> None:
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["language"]) == ("local", "system")
    assert hook["entry"] == "./scripts/check"
    assert hook["pass_filenames"] == "false"
