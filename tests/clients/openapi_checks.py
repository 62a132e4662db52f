"""/openapi.json: a validator of the specification, and a client that is generated from it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openapi_spec_validator
from checking import SQL, SQL_ANSWER, SQL_PROMPT, Server

ARCHIVES = ("application/x-tar", "application/gzip", "application/zip")


def _document(server: Server) -> Any:
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        return json.loads(answer.read())


def check_validates(server: Server) -> None:
    """openapi-spec-validator finds no fault."""
    openapi_spec_validator.validate(_document(server))


def check_generated_client(server: Server) -> None:
    """openapi-python-client makes a client without a warning, and it parses a chat's answer."""
    Path("openapi.json").write_text(json.dumps(_document(server)))
    octets = dict.fromkeys(ARCHIVES, "application/octet-stream")  # the generator knows no archives
    Path("config.yaml").write_text(json.dumps({"content_type_overrides": octets, "post_hooks": []}))
    program = str(Path(sys.executable).parent / "openapi-python-client")
    command = [program, "generate", "--path", "openapi.json", "--meta", "none", "--output-path", "made_client"]
    command += ["--config", "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).casefold(), done.stdout + done.stderr
    sys.path.insert(0, str(Path.cwd()))
    made: Any = importlib.import_module("made_client")
    client = made.AuthenticatedClient(base_url=server.url, token=server.key)
    api = importlib.import_module("made_client.api")
    (chat,) = [path for path in Path(api.__path__[0]).rglob("*.py") if path.stem.endswith("chat_completions")]
    module: Any = importlib.import_module(f"made_client.api.{chat.parent.name}.{chat.stem}")
    (body_class,) = [value for name, value in vars(module).items() if name.endswith("Fields")]
    body = body_class.from_dict(
        {"model": SQL, "messages": [{"role": "user", "content": SQL_PROMPT}], "temperature": 0.0, "max_tokens": 64}
    )
    answer = module.sync(client=client, body=body)
    assert answer is not None, "the answer was not parsed"
    assert answer.choices[0].message.content == SQL_ANSWER
