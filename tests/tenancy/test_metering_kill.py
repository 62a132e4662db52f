"""kill -9 in the middle of metering: at most what was not flushed is lost, and nothing is counted twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lora_serve.tenancy.metering import Meter
from lora_serve.tenancy.shared import UsageExchange
from lora_serve.tenancy.usage import UsageJournal

FOREVER = 2**40
BATCH = 7
ROOT = Path(__file__).parents[2]  # where the package `tests` is found


def killed(store: Path, *more: str, after: int) -> int:
    """How many requests the process had said were flushed when it was killed."""
    command = [sys.executable, "-m", "tests.tenancy.metering_process", str(store), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        said = [int(next(process.stdout)) for _ in range(after)]
        process.kill()
        said += [int(line) for line in process.stdout if line.endswith("\n")]
    return said[-1]


@pytest.mark.timeout(600)
def test_killed_server_loses_no_more_than_its_last_batch_and_counts_nothing_twice(tmp_path: Path) -> None:
    said = 0
    for after in (1, 5, 23):
        before = said
        said = before + killed(tmp_path, after=after)
        journal = UsageJournal(tmp_path)
        counted = sum(row[2].requests for row in journal.rows(0, FOREVER))
        journal.close()
        assert said <= counted <= said + BATCH
        said = counted


@pytest.mark.timeout(600)
async def test_other_replicas_see_what_the_killed_one_had_flushed_once_it_is_back(
    tmp_path: Path, redis_url: str
) -> None:
    said = killed(tmp_path, redis_url, after=9)
    other = Meter(UsageJournal(tmp_path / "other"), UsageExchange(redis_url, "t", "other", 400, timeout=30))
    rows, _ = await other.rows(0, FOREVER)
    assert said <= sum(row[2].requests for row in rows) <= said + BATCH
    again = Meter(UsageJournal(tmp_path), UsageExchange(redis_url, "t", "victim", 400, timeout=30))
    await again.flush()
    own, _ = await again.rows(0, FOREVER)
    seen, _ = await other.rows(0, FOREVER)
    assert sum(row[2].requests for row in own) == sum(row[2].requests for row in seen)
    await again.close()
    await other.close()
