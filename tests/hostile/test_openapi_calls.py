"""Schemathesis reads /openapi.json and calls every operation with what fits its schema and with what does not.

Its own checks judge the answers: no 5xx, only statuses and kinds of answer that the document promises, refusals of its
form, nothing without the key it asks for. (That of other methods is left out: PUT of "acme/pin" uploads that id.) It
learns ids from answers, so it deletes what it sees: the admin's calls leave out what takes canaries' things away, a
tenant's own admin may call everything.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.canary.house import ADMIN, KEY, House
from tests.canary.questions import World
from tests.hostile.adapter_files import files_of, tar
from tests.hostile.sending import call, post
from tests.tiers import by_tier

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
NEVER_ENDS = "^get_admin_engine_stream$"
TAKES_AWAY = f"{NEVER_ENDS}|^(delete_|patch_|put_admin_(engine|adapters_id_(route|sharing)$|aliases)|post_v1_unload)"


def run(house: House, folder: Path, key: str, *flags: str, least: int) -> None:
    command = [
        str(SCHEMATHESIS), "run", f"{house.url}/openapi.json",
        "--header", f"Authorization: Bearer {key}", "--checks", ",".join(CHECKS), "--seed", "1", "--no-shrink",
        "--continue-on-failure", "--request-timeout", "60", "--no-color", *flags,
        "--suppress-health-check", "filter_too_much",  # of how forms with many parts are drawn
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    calls = re.search(r"(\d+) generated", done.stdout)
    assert calls is not None
    assert int(calls[1]) > least


@pytest.fixture(scope="module")
def tenant_admin_key(house: House, world: World) -> str:
    """Of a tenant with an adapter of its own to play with."""
    assert post(house, "/admin/tenants", {"name": "player"}).status == 201
    adapter = tar(files_of(world.adapters["acme/a"]))
    assert call(house, "PUT", "/admin/adapters/player/toy?tenant=player", adapter, dict(ADMIN)).status == 201
    made = post(house, "/admin/tenants/player/keys", {"role": "tenant-admin"})
    return str(json.loads(made.body)["secret"])


@pytest.mark.nightly  # by day all are called below, as a tenant's admin
@pytest.mark.parametrize("paths", ["/v1/completions$", "/"])
def test_every_call_of_the_admin_is_answered_as_the_document_says(house: House, tmp_path: Path, paths: str) -> None:
    flags = ("--phases", "coverage", "--include-path-regex", f"^{paths}", "--exclude-operation-id-regex", TAKES_AWAY)
    run(house, tmp_path, KEY, *flags, least=300)


@pytest.mark.search
def test_every_call_of_a_tenants_admin_is_answered_as_the_document_says(
    house: House, tenant_admin_key: str, tmp_path: Path
) -> None:
    run(
        house,
        tmp_path,
        tenant_admin_key,
        "--phases",
        "fuzzing",
        "--max-examples",
        str(by_tier(4, 100)),
        "--exclude-operation-id-regex",
        NEVER_ENDS,
        least=by_tier(100, 300),
    )
