"""A server on two replicas passes the tests of any server, unchanged: they are run again, in a pytest of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--engine", "ray", "--replicas", "2"]

# What is asked for, the files, and how many tests they have at least.
SUBJECTS: Mapping[str, tuple[Sequence[str], int]] = {
    "wire and streams": (
        ["test_openai_client", "test_engine_hosts", "test_adapter_kinds", "test_structured_output", "test_embeddings"],
        40,
    ),
    "tenants and registry": (["test_replicas", "test_tenant_replicas", "test_bad_adapters", "test_many_adapters"], 18),
    "life": (["test_ending", "test_lifetime", "test_warm_start", "test_clients_and_the_log"], 25),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_fleet_passes_the_tests_of(subject: str, tmp_path: Path) -> None:
    names, least = SUBJECTS[subject]
    files = [f"tests/e2e/{name}.py" for name in names]
    done = subprocess.run(
        [*RUN, "--basetemp", str(tmp_path / "t"), *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= least
