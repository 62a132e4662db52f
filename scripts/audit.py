"""Known vulnerabilities of the pinned requirements, by pip-audit; part of scripts/check.

Exit code 0: none but those of scripts/audit_ignored.txt, or the index cannot be reached, which is said; 1: there are.
Usage: python scripts/audit.py [REQUIREMENTS] [flags for pip-audit]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IGNORED = ROOT / "scripts" / "audit_ignored.txt"
SECONDS = 120  # for all of it; a slow index is one that cannot be reached


def main(arguments: list[str]) -> int:
    requirements, flags = (arguments[0], arguments[1:]) if arguments else (str(ROOT / "constraints.txt"), [])
    report, words = audit(Path(requirements), flags)
    if report is None:
        print(f"pip-audit: the index cannot be reached, nothing was audited ({words})")
        return 0
    ignored = read_ignored(IGNORED)
    found = [(package, finding) for package in report["dependencies"] for finding in package.get("vulns", [])]
    bad = [(package, finding) for package, finding in found if not names_of(finding) & ignored.keys()]
    for package, finding in bad:
        fixed = ", ".join(finding.get("fix_versions", [])) or "no version yet"
        print(f"{package['name']} {package['version']}: {finding['id']}, fixed in {fixed}")
    counts = f"{len(bad)} vulnerabilities, {len(found) - len(bad)} ignored"
    print(f"pip-audit: {len(report['dependencies'])} packages, {counts}")
    return 1 if bad else 0


def audit(requirements: Path, flags: list[str]) -> tuple[dict[str, Any] | None, str]:
    """pip-audit's report, or None and its last words if it could not make one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip_audit", "-r", str(requirements), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--output", str(out), "--progress-spinner", "off", "--timeout", "10", *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {SECONDS} s"
        lines = done.stderr.strip().splitlines() or ["it ended without a report"]
        try:
            return json.loads(out.read_text()), ""
        except (OSError, ValueError):
            return None, lines[-1][:200]


def names_of(finding: dict[str, Any]) -> set[str]:
    """One vulnerability has an id in each of several lists."""
    return {str(finding["id"]), *map(str, finding.get("aliases", []))}


def read_ignored(path: Path) -> dict[str, str]:
    """id -> reason, of lines `ID reason`. Raises ValueError for an id without a reason."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    entries = dict(line.split(maxsplit=1) if " " in line else (line, "") for line in lines if line)
    if without := [name for name, reason in entries.items() if not reason]:
        raise ValueError(f"{path.name}: {without[0]} has no reason")
    return entries


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
