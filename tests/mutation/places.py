"""What is mutated, and which tests are asked."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".mutation"
PACKAGES = ("lora_serve/engine", "lora_serve/tenancy", "lora_serve/adapters/catalog")

# Tests of the default tier that reach these packages within a process, below tests/. Those that start browsers,
# clusters of Ray and whole servers in processes of their own are not asked, so the rate is a lower bound.
FOLDERS = (
    "engine",
    "tenancy",
    "adapters",
    "contracts/test_catalog.py",
    "simulate",
    "client",
)


def files() -> list[str]:
    """The files that are mutated, relative to the repository."""
    return sorted(str(file.relative_to(ROOT)) for name in PACKAGES for file in (ROOT / name).rglob("*.py"))


def package_of(file: str) -> str:
    return next(name for name in PACKAGES if file.startswith(f"{name}/"))


def shares(size: dict[str, int], number: int) -> dict[str, int]:
    """A number divided in proportion, by the largest remainders."""
    whole = sum(size.values())
    exact = {name: number * lines / whole for name, lines in size.items()}
    found = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[: number - sum(found.values())]:
        found[name] += 1
    return found
