"""scripts/audit.py against a vulnerability service of the test's own, in the form of osv.dev."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from tests.http_thread import serving

ROOT = Path(__file__).resolve().parents[1]
FINDING = {
    "id": "PYSEC-2099-1",
    "aliases": ["CVE-2099-1"],
    "summary": "a hole",
    "details": "a hole",
    "modified": "2099-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "holey", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}],
        }
    ],
}


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_script", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "IGNORED", tmp_path / "ignored.txt")
    (tmp_path / "ignored.txt").write_text("# nothing\n")
    return module


@pytest.fixture
def requirements(tmp_path: Path) -> str:
    path = tmp_path / "requirements.txt"
    path.write_text("holey==1.0\nsound==1.0\n")
    return str(path)


def service() -> web.Application:
    async def query(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        is_holey = body["package"]["name"] == "holey"
        return web.json_response({"vulns": [FINDING]} if is_holey else {})

    app = web.Application()
    app.router.add_post("/v1/query", query)
    return app


def flags(url: str) -> list[str]:
    return ["--vulnerability-service", "osv", "--osv-url", f"{url}/v1/query"]


def test_known_vulnerability_fails_and_is_named(
    audit: ModuleType, requirements: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(service()) as url:
        assert audit.main([requirements, *flags(url)]) == 1
    said = capsys.readouterr().out
    assert "holey 1.0: PYSEC-2099-1, fixed in 2.0" in said
    assert "2 packages, 1 vulnerabilities, 0 ignored" in said


@pytest.mark.parametrize("name", ["PYSEC-2099-1", "CVE-2099-1"])
def test_vulnerability_that_is_listed_with_a_reason_passes(
    audit: ModuleType, requirements: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.IGNORED.write_text(f"{name} the hole is on another side\n")
    with serving(service()) as url:
        assert audit.main([requirements, *flags(url)]) == 0
    assert "0 vulnerabilities, 1 ignored" in capsys.readouterr().out


def test_entry_without_a_reason_is_refused(audit: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("CVE-2099-1\n")
    with pytest.raises(ValueError, match="CVE-2099-1 has no reason"):
        audit.read_ignored(tmp_path / "list")


def test_service_that_cannot_be_reached_is_said_and_passes(
    audit: ModuleType, requirements: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert audit.main([requirements, *flags(f"http://127.0.0.1:{closed.getsockname()[1]}")]) == 0
    assert "nothing was audited" in capsys.readouterr().out


def test_the_list_of_this_repository_has_reasons(audit: ModuleType) -> None:
    assert audit.read_ignored(ROOT / "scripts" / "audit_ignored.txt") is not None


def test_check_script_audits() -> None:
    assert "scripts/audit.py" in (ROOT / "scripts" / "check").read_text()
