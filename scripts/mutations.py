"""Twenty breaks of the code, each in a copy of the repository: does the default tier of the tests see it?

    python scripts/mutations.py [--list] [WORD ...]     all of them, or those whose name holds a word

Prints a table for docs/testing.md; exits with 1 if a break is not seen or its place is no longer there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lora_serve", "tests", "benchmarks", "scripts", "docs", "pyproject.toml", "README.md", "constraints.txt")


@dataclass(frozen=True)
class Mutation:
    """A break, and the tests that must see it."""

    name: str
    invariant: str  # of docs/DESIGN.md, section 3
    file: str  # below lora_serve/
    old: str
    new: str
    tests: str  # below tests/, separated by blanks


MUTATIONS = (
    Mutation(
        "a row takes another slot's adapter", "1", "model/step_context.py",
        "(end - first, adapter.slot.index, adapter.scale)",
        "(end - first, max(0, adapter.slot.index - 1), adapter.scale)",
        "model/test_architectures.py",
    ),
    Mutation(
        "a slot's generation is not checked", "1", "model/runner/model_runner.py",
        "            for adapter in row.adapters:\n                self._slots.check(adapter.slot)",
        "            for _ in row.adapters:\n                pass",
        "model/runner",
    ),
    Mutation(
        "a KV block's key forgets the adapter's scale", "1", "engine/prefix_cache.py",
        "sorted((use.ref.digest, use.scale, ", "sorted((use.ref.digest, 1.0, ", "engine/test_prefix_cache.py",
    ),
    Mutation(
        "tenants share KV blocks", "7", "engine/prefix_cache.py",
        'self._root("" if shares_base else scope, is_long)', 'self._root("", is_long)',
        "engine/test_prefix_cache.py isolation/test_prefix_salt.py",
    ),
    Mutation(
        "a pinned adapter is evicted", "1", "engine/slots.py",
        "return 0 if self._entries[digest].is_evictable and digest not in keep else None",
        "return 0 if not self._entries[digest].num_rows else None", "engine/test_residency.py",
    ),
    Mutation(
        "slots of a row that ended stay in use", "4", "engine/scheduling/scheduler.py",
        "            self._residency.release(slot)\n", "            pass\n", "engine/scheduling",
    ),
    Mutation(
        "a client that leaves aborts nothing", "4", "client/base.py",
        "self._send(Abort(request.request_id, is_answered))", "pass", "client contracts/test_engine_client.py",
    ),
    Mutation(
        "an adapter that changes nothing is taken", "2", "adapters/registration/verification.py",
        "if result.is_noop and not allow_noop:", "if False:", "adapters/registration/test_smoke_test.py",
    ),
    Mutation(
        "tensors that nothing asks for are dropped silently", "2", "adapters/checkpoint/binder.py",
        "            if place.module not in untargeted:\n", "            if False:\n", "adapters/checkpoint",
    ),
    Mutation(
        "a blob is named before it is flushed", "5", "adapters/stores/disk.py",
        "            flush(scratch)\n", "", "adapters/stores faults/test_disk_faults.py",
    ),
    Mutation(
        "tokens are not counted against limits", "6", "tenancy/rate_limiter.py",
        'max(1, min(num_tokens, limit.limit)) if limit.unit == "tokens" else 1', "1", "tenancy/test_rate_limiter.py",
    ),
    Mutation(
        "another tenant's adapter is found", "7", "adapters/catalog/catalog.py",
        "if not entry.is_visible_to(tenant) or entry is _NOBODYS:", "if entry is _NOBODYS:",
        "server/test_tenant_isolation.py adapters/catalog",
    ),
    Mutation(
        "an unknown adapter is the base model", "2", "server/inference/resolve.py",
        "            raise AdapterNotFoundError(name) from None", "            return None",
        "server/inference server/test_completions.py",
    ),
    Mutation(
        "every token of a seed is drawn with the same number", "3", "model/runner/sampler.py",
        "[row.num_output_tokens for row in members])", "[0 for _ in members])", "model/runner",
    ),
    Mutation(
        "a stop string is shown", "6", "text/output.py",
        "(0 if self._include else len(matched))", "0", "text/test_stop.py text/test_output.py",
    ),
    Mutation(
        "a later chunk of a prompt does not see the first one", "3", "model/runner/packing.py",
        "PrefillRow(start, end, row.start, own)", "PrefillRow(start, end, 0, own)",
        "model/runner model/test_prefix_cache.py",
    ),
    Mutation(
        "an archive's member may point outside", "7", "adapters/archives/unpacking.py",
        'if path.is_absolute() or ".." in path.parts or', "if path.is_absolute() or", "adapters/archives",
    ),
    Mutation(
        "deletions are missing in the audit log", "5", "server/middleware.py",
        "if route is not None and route.is_act:", 'if route is not None and route.is_act and route.method != "DELETE":',
        "server/guards server/accounting",
    ),
    Mutation(
        "the first chunks of a stream are sent in reverse", "3", "server/openai/answering.py",
        "for _, data in early:", "for _, data in reversed(early):", "server/test_streaming.py",
    ),
    Mutation(
        "a revoked key opens", "7", "tenancy/authenticator.py",
        "if key.revoked is not None or tenant is None:", "if tenant is None:", "tenancy",
    ),
)  # fmt: skip


def main(words: list[str]) -> int:
    """The number of breaks that were not seen, as an exit code."""
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    print("| break | invariant | file | seen by |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        found = [seen_by(mutation, copy) for mutation in chosen]
    return int(not all(found))


def seen_by(mutation: Mutation, copy: Path) -> bool:
    """Break the copy, run its tests, mend it; a row of the table says which test failed."""
    path = copy / "lora_serve" / mutation.file
    sound = path.read_text() if path.exists() else ""
    is_there = sound.count(mutation.old) == 1
    test = failing(mutation, path, sound, copy) if is_there else "the place is not there"
    print(f"| {mutation.name} | {mutation.invariant} | `{mutation.file}` | {test or 'NOBODY'} |", flush=True)
    return is_there and test is not None


def failing(mutation: Mutation, path: Path, sound: str, copy: Path) -> str | None:
    """The first test that fails."""
    path.write_text(sound.replace(mutation.old, mutation.new))
    tests = [f"tests/{name}" for name in mutation.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    path.write_text(sound)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if done.returncode not in (0, 1):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return f"`{lines[0].split()[1].partition('[')[0]}`" if lines else None


if __name__ == "__main__":
    if "--list" in sys.argv:
        print("\n".join(mutation.name for mutation in MUTATIONS))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
