"""GuideLLM: a short benchmark finds no failed request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checking import SQL, Server

NUM_REQUESTS = 12


def check_benchmark(server: Server) -> str:
    """`guidellm run` with two concurrent streams: every request completes."""
    program = str(Path(sys.executable).parent / "guidellm")
    data = "kind=synthetic_text,prompt_tokens=32,output_tokens=8"
    command = [program, "run", "--disable-console", "--profile", "kind=concurrent,streams=[2]"]
    command += ["--backend", f"kind=openai_http,target={server.url},model={SQL},api_key={server.key}"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--data", data]
    command += [
        "--tokenizer",
        f"kind=huggingface_auto,model={server.model_folder}",
        "--output",
        "kind=json,path=report.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3500:]
    report = json.loads(Path("report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == NUM_REQUESTS, totals
    assert totals["errored"] == 0, totals
    return f"{totals['successful']} requests, none failed"
