"""`scripts/clients`: makes each client's environment, starts one server on the demo model, runs the checks, and writes
what passed to docs/reference/clients.md and benchmarks/results/clients.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_serve.commands.demo import BASE, DATA, adapter_folders
from lora_serve.commands.server_process import ServerProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reference" / "clients.md"
RECORDED = HERE / "recorded"  # requests of programs that are no libraries
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
ENVIRONMENTS = Path(os.environ.get("LORA_SERVE_CLIENTS", ROOT / ".clients"))
READY_SECONDS = 180.0
CHECK_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client library: its checks are in `<name>_checks.py`, what they need in `<name>.txt`, exactly pinned."""

    name: str
    packages: tuple[str, ...]  # whose versions the table shows
    shares_packages: bool = False  # it sees the packages of this environment too (torch, transformers, peft)

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"


CLIENTS = (
    Client("openai", ("openai",)),
    Client("anthropic", ("anthropic",)),
    Client("langchain", ("langchain-openai", "langchain")),
    Client("litellm", ("litellm",)),
    Client("instructor", ("instructor",)),
    Client("pydantic_ai", ("pydantic-ai-slim",)),
    Client("llama_index", ("llama-index-llms-openai-like",)),
    Client("lm_eval", ("lm_eval",), shares_packages=True),
    Client("guidellm", ("guidellm",), shares_packages=True),
    Client("recorded", ()),
    Client("openapi", ("openapi-spec-validator", "openapi-python-client")),
)


def environment(client: Client) -> Path:
    """The Python of the client's environment, which is made if it is not there or was made for other pins."""
    folder = ENVIRONMENTS / client.name
    python, stamp = folder / "bin" / "python", folder / ".requirements"
    wanted = client.requirements.read_text()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of {client.name}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if client.shares_packages:
        shared = next(path for path in sys.path if path.endswith("site-packages"))
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(f"{shared}\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(client.requirements)]
    subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    return python


@contextmanager
def demo_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server on the demo model with the demo's adapters and keys on; gives the environment of the checks."""
    folders = adapter_folders()
    arguments = ["--model", str(DATA / "model"), "--served-model-name", BASE, "--dtype", "float32", "--auth", "on"]
    arguments += ["--store", str(folder / "store"), "--max-loras", "16", "--admin-key", "a-key-for-checks-only"]
    for name, path in folders.items():
        arguments += ["--lora-modules", f"{name}={path}"]
    with ServerProcess(arguments, folder / "server.log") as server:
        server.wait_until_ready(READY_SECONDS)
        key = _tenant_key(server.url, sorted(folders))
        yield {
            "CHECKED_URL": server.url,
            "CHECKED_KEY": key,
            "CHECKED_RECORDED_FOLDER": str(RECORDED),
            "CHECKED_MODEL_FOLDER": str(DATA / "model"),
            "CHECKED_ADAPTERS_FOLDER": str(DATA / "adapters"),
        }


def _tenant_key(url: str, adapters: Sequence[str]) -> str:
    """The key of a new tenant with whom all of the demo's adapters are shared."""
    _admin(url, "POST", "/admin/tenants", {"name": "checks"})
    for name in adapters:
        _admin(url, "PUT", f"/admin/adapters/{name}/sharing", {"shared_with": ["checks"]})
    made = _admin(url, "POST", "/admin/tenants/checks/keys", {"label": "clients"})
    return str(made["secret"])


def _admin(url: str, method: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": "Bearer a-key-for-checks-only", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


def results_of(client: Client, server: dict[str, str]) -> list[dict[str, Any]]:
    """The results of the client's checks. A run that ends without any is one failed check."""
    python = environment(client)
    command = [str(python), "-I", str(HERE / "checking.py"), client.name, *client.packages]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LORA_SERVE_", "PYTHON"))}
    clean |= server | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, env=clean, cwd=scratch, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("CHECK ")]
    if not found:
        error = (done.stdout + done.stderr)[-4000:]
        found = [
            {
                "client": client.name,
                "versions": {},
                "check": "start",
                "says": "",
                "seconds": 0,
                "error": error,
                "found": None,
            }
        ]
    return found


def page(results: Sequence[dict[str, Any]]) -> str:
    """The table of what passed."""
    lines = [
        "# Tested clients",
        "",
        "`scripts/clients` runs these libraries, unchanged and each in an environment of its own, against a server on",
        "the demo model; the nightly tests do the same. This table is what it wrote.",
        "",
        "| client | check | what it does | passed |",
        "|---|---|---|---|",
    ]
    for result in results:
        versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items()) or result["client"]
        verdict = "yes" if result["error"] is None else "NO"
        says = " ".join(f"{result['says']} {result['found'] or ''}".split())
        lines.append(f"| {versions} | {result['check'].replace('_', ' ')} | {says} | {verdict} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Runs all clients, or those named. Returns 1 if a check failed. Only a whole run writes the page."""
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *(client.name for client in CLIENTS)], metavar="CLIENT")
    names = parser.parse_args(arguments).names
    chosen = [client for client in CLIENTS if not names or client.name in names]
    for client in chosen:
        environment(client)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lora_serve_clients_") as folder, demo_server(Path(folder)) as server:
        for client in chosen:
            for result in results_of(client, server):
                results.append(result)
                verdict = "passed" if result["error"] is None else "FAILED"
                print(f"{verdict}  {client.name}: {result['check']}  {result['found'] or ''}")
                if result["error"] is not None:
                    print(result["error"])
    if not names:
        PAGE.write_text(page(results))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["error"] is not None for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
