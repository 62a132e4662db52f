"""Writes pages of docs/reference: flags from the settings, api from the schemas of requests, the rest from a server.

The server is the demo's: what it tells under /openapi.json and /metrics is what clients see. Meanings of the fields of
requests are in docs/reference/fields.yaml, one line each; a field without one, and one that no route has, is an error.
The text that http.md begins with is docs/reference/http.txt.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
MODEL = ROOT / "lora_serve" / "demo_data" / "model"
NOTE = "<!-- Written by scripts/docs. Do not edit. -->"
BYTES = {2**10: "KiB", 2**20: "MiB", 2**30: "GiB"}
TYPES = {
    "logit_bias": "object",
    "messages": "list of messages",
    "stop": "text, or list of text",
}  # better than a schema's
UNITS = {"_ms": "ms", "_timeout": "s", "_seconds": "s", "_days": "days", "_tokens": "tokens"}


def main() -> int:
    """Writes the pages; exit code 1 if a field has no meaning."""
    for name, text in pages().items():
        (PAGES / name).write_text(text)
    return 0


def pages() -> dict[str, str]:
    """File name -> its text."""
    openapi, metrics = from_server()
    meanings = yaml.safe_load((PAGES / "fields.yaml").read_text())
    clients = yaml.safe_load((PAGES / "clients.yaml").read_text())
    made = {"flags.md": flags_page(), "vllm-flags.md": vllm_flags_page(), "api.md": api_page(meanings, clients)}
    return {**made, "http.md": http_page(openapi, meanings), "metrics.md": metrics_page(metrics)}


def from_server() -> tuple[dict[str, Any], str]:
    """/openapi.json and /metrics of a server on the bundled model, after one request with an adapter."""
    from lora_serve.commands.server_process import ServerProcess

    sql = ROOT / "lora_serve" / "demo_data" / "adapters" / "acme" / "sql"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--model", str(MODEL), "--served-model-name", "base", "--store", f"{folder}/store"]
        arguments += ["--lora-modules", f"acme/sql={sql}", "--warmup", "off", "--overflow", "gpu=http://near.invalid"]
        with ServerProcess(arguments, Path(folder) / "log") as server:
            server.wait_until_ready(120)
            _get(server.url + "/v1/completions", {"model": "acme/sql", "prompt": "a b", "max_tokens": 2})
            return json.loads(_get(server.url + "/openapi.json")), _get(server.url + "/metrics")


def _get(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def flags_page() -> str:
    """Every flag of `lora-serve serve`, by group."""
    from lora_serve.core.settings import Settings

    groups: dict[str, list[str]] = {}
    for name, field in Settings.model_fields.items():
        row = [f"`--{name.replace('_', '-')}`", f"`LORA_SERVE_{name.upper()}`", f"`{name}`"]
        row += [_unit(name, field), _default(field), _words(_choices(field) + (field.description or ""))]
        groups.setdefault(_group(Settings, name), []).append(_row(row))
    lines = [NOTE, "# Flags", "", FLAGS]
    for group, rows in groups.items():
        lines += ["", f"## {group.rstrip('.')}", "", _row(["flag", "variable", "key", "unit", "default", "meaning"])]
        lines += [_row(["---"] * 6), *rows]
    return "\n".join(lines) + "\n"


FLAGS = """\
Every setting of `lora-serve serve` is a flag, an environment variable and a key of the YAML file that `--config`
names. A flag wins over the environment, the environment over the file. A flag that takes several values may be
repeated; in the environment its values stand with commas between them, or as a JSON list. Bytes may be given as
`512MiB` or `2GiB`; `--no-` before its name turns a flag off. A wrong value ends the start with exit code 2 and a line
that names the flag, the value and what is allowed. `LORA_SERVE_KERNELS`, a variable that is no flag, takes a lower
level of the CPU's kernels than the processor's best. See [numbers and kernels](../how-to/kernels.md)."""


def vllm_flags_page() -> str:
    """Every flag of `vllm serve` that is taken, by what becomes of it."""
    from lora_serve.core.settings import Settings
    from lora_serve.core.vllm_table import FLAGS, Fate

    lines = [NOTE, "# vLLM's flags", "", VLLM_FLAGS, "", "## The same", "", "A flag of the same name does the same."]
    lines += ["", ", ".join(f"`--{name.replace('_', '-')}`" for name in VLLM_NAMES if name in Settings.model_fields)]
    for fate in Fate:
        head = ["flag", "here", "what is different"] if fate is Fate.MEANT else ["flag", "why"]
        head = ["flag", "taken with", "why"] if fate is Fate.REFUSED else head
        lines += ["", f"## {fate.value[0].upper()}{fate.value[1:]}", "", _row(head), _row(["---"] * len(head))]
        for flag in FLAGS:
            if flag.fate is fate:
                names = ", ".join(f"`{name}`" for name in (flag.name, flag.short) if name)
                middle = {Fate.MEANT: [f"`{flag.setting}`"], Fate.IGNORED: [], Fate.REFUSED: [_harmless(flag.harmless)]}
                lines.append(_row([names, *middle[fate], _words(flag.why)]))
    return "\n".join(lines) + "\n"


def _harmless(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values if value)


VLLM_FLAGS = """\
`lora-serve serve` takes the line of `vllm serve`: the model may stand alone, `--max_loras` is `--max-loras`, and every
flag below is known. What means the same does the same. What means nothing here is accepted, with a line of log. What
would change answers ends the start with exit code 2, before anything is loaded, and says why."""
VLLM_NAMES = (
    "model served_model_name host port api_key lora_modules max_loras max_lora_rank max_cpu_loras dtype quantization "
    "task max_model_len max_num_seqs max_num_batched_tokens block_size swap_space gpu_memory_utilization "
    "enable_prefix_caching max_logprobs seed device chat_template tool_call_parser reasoning_parser allowed_origins "
    "ssl_certfile ssl_keyfile ssl_ca_certs ssl_cert_reqs otlp_traces_endpoint shutdown_timeout config"
).split()


def _group(settings: type, name: str) -> str:
    """The first line of the docstring of the group that the setting stands in."""
    owners = (group for group in settings.__bases__ for kind in group.__mro__ if name in inspect.get_annotations(kind))
    return (next(owners).__doc__ or "").splitlines()[0]


def _unit(name: str, field: Any) -> str:
    description, schema = field.description or "", str(field.annotation) + str(field.metadata)
    if field.annotation is bool:
        return ""
    if "as_bytes" in schema or description.startswith("bytes"):
        return "bytes"
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return unit
    for word in ("milliseconds", "seconds", "days", "tokens"):
        if description.startswith(word):
            return {"milliseconds": "ms", "seconds": "s"}.get(word, word)
    return ""


def _choices(field: Any) -> str:
    """The values that are allowed, if they are a list."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    return " | ".join(f"`{value}`" for value in get_args(kinds[0])) + ": " if kinds else ""


def _default(field: Any) -> str:
    from lora_serve.core.flags import default_on_cuda

    on_cuda, shown = default_on_cuda(field), _shown_default(field, field.default)
    return shown if on_cuda is None else f"{shown}; on a GPU {_shown_default(field, on_cuda)}"


def _shown_default(field: Any, value: Any) -> str:
    if field.is_required():
        return "required"
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    for size in sorted(BYTES, reverse=True):
        if isinstance(value, int) and value >= 2**20 and value % size == 0:
            return f"`{value // size}{BYTES[size]}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def http_page(openapi: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    """Every route, and the fields of each body and query."""
    lines = [
        NOTE,
        "# HTTP",
        "",
        (PAGES / "http.txt").read_text().rstrip(),
        "",
        "## Routes",
        "",
        _row(["call", "key", "body or query"]),
        _row(["---"] * 3),
    ]
    bodies: dict[str, dict[str, Any]] = {}
    used: set[str] = set()
    for method, path, operation in _operations(openapi):
        names = _schema_names(operation)
        queries = [item["name"] for item in operation.get("parameters", ()) if item["in"] != "path"]
        says = " or ".join(f"[{name}](#{name.lower()})" for name in names) or ", ".join(f"`{name}`" for name in queries)
        used.update(queries)
        lines.append(_row([f"`{method} {path}`", "yes" if "security" in operation else "no", says]))
        bodies |= {name: openapi["components"]["schemas"][name] for name in names}
    lines += ["", "## Fields of bodies"]
    for name in _with_parts(bodies, openapi):
        schema = openapi["components"]["schemas"][name]
        required = set(schema.get("required", ()))
        lines += ["", f"### {name}", "", _row(["field", "type", "default", "meaning"]), _row(["---"] * 4)]
        for field, facts in schema.get("properties", {}).items():
            used.add(field)
            default = "required" if field in required else _shown(facts.get("default"))
            kind = TYPES.get(field) or _type(facts)
            meaning = facts.get("description") or _meaning(meanings, name, field)
            lines.append(_row([f"`{field}`", kind, default, _words(meaning)]))
    lines += ["", "## Fields of queries", "", _row(["field", "meaning"]), _row(["---"] * 2)]
    for field in sorted({item for *_, operation in _operations(openapi) for item in _queries(operation)}):
        lines.append(_row([f"`{field}`", _words(_meaning(meanings, "query", field))]))
    if unknown := {key.rpartition(".")[2] for key in meanings} - used:
        sys.exit(f"docs/reference/fields.yaml explains fields that no route has: {sorted(unknown)}")
    return "\n".join(lines) + "\n"


def _operations(openapi: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def _queries(operation: Mapping[str, Any]) -> list[str]:
    return [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]


def _schema_names(operation: Mapping[str, Any]) -> list[str]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema]) if "$ref" in each]


def _with_parts(bodies: Mapping[str, Any], openapi: Mapping[str, Any]) -> list[str]:
    """The bodies and the schemas that their fields refer to."""
    names, found = list(bodies), []
    while names:
        name = names.pop(0)
        schema = openapi["components"]["schemas"][name]
        if name not in found and "properties" in schema:
            found.append(name)
        names += [ref for ref in re.findall(r"#/components/schemas/(\w+)", json.dumps(schema)) if ref not in found]
    return found


def _type(facts: Mapping[str, Any]) -> str:
    """A schema in words."""
    if options := facts.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(item) for item in options if item.get("type") != "null"))
    if "$ref" in facts:
        name = facts["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if not name.startswith(("Role", "AdapterState")) else "text"
    if "enum" in facts:
        return ", ".join(f"`{value}`" for value in facts["enum"])
    kind = {"string": "text", "number": "number", "boolean": "true, false"}.get(
        facts.get("type", ""), facts.get("type", "any")
    )
    if facts.get("type") == "array":
        return f"list of {_type(facts.get('items', {}))}"
    low, high = facts.get("minimum", facts.get("exclusiveMinimum")), facts.get("maximum", facts.get("exclusiveMaximum"))
    over = "above " if "exclusiveMinimum" in facts else ""
    if low is not None and high is not None and high < 2**31 - 1:
        return f"{kind}, {over}{_number(low)} to {_number(high)}"
    return f"{kind}, {over or 'from '}{_number(low)}" if low is not None and low > -(2**31) else kind


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:g}"


def _shown(value: Any) -> str:
    return "" if value is None or value in ([], {}) else f"`{json.dumps(value)}`"


def _meaning(meanings: Mapping[str, str], schema: str, field: str) -> str:
    for key in (f"{schema}.{field}", field):
        if key in meanings:
            return meanings[key]
    sys.exit(f"docs/reference/fields.yaml does not explain {schema}.{field}")


def api_page(meanings: Mapping[str, str], clients: Mapping[str, Any]) -> str:
    """Every field that clients' request types have, and each of ours: works, refused or ignored."""
    from lora_serve.server.routes import TABLE

    schemas = {route.path: route.schemas[0] for route in TABLE.routes if route.method == "POST" and route.schemas}
    sources = "; ".join(f"{api}: {facts['source']}" for api, facts in clients.items())
    lines = [NOTE, "# Fields of OpenAI, vLLM and Anthropic", "", API.replace("SOURCES", sources)]
    for path in dict.fromkeys(path for facts in clients.values() for path in facts["fields"]):
        names = {api: set(facts["fields"].get(path, ())) for api, facts in clients.items()}
        fields = schemas[path].model_fields
        if unknown := set().union(*names.values()) - set(fields):
            sys.exit(f"{path} neither reads, refuses nor ignores on purpose: {sorted(unknown)}")
        lines += ["", f"## POST {path}", "", _row(["field", "of", "here", "meaning, or why"]), _row(["---"] * 4)]
        for name in sorted(fields):
            whose = ", ".join(api for api in names if name in names[api]) or "lora_serve"
            lines.append(_row([f"`{name}`", whose, *_standing(fields[name], schemas[path].__name__, name, meanings)]))
    return "\n".join(lines) + "\n"


API = """\
A request may carry any field that the request types of OpenAI's, vLLM's and Anthropic's clients have. Each one either
works, or is refused with 400 in words because it would change the answer, or is ignored on purpose because what the
caller gets is the same without it. Fields that no list has are ignored. The lists: SOURCES.

Types and limits are in [HTTP](http.md)."""


def _standing(field: Any, schema: str, name: str, meanings: Mapping[str, str]) -> tuple[str, str]:
    from lora_serve.server.schemas.fields import Refused, standing

    mark = standing(field)
    if mark is None:
        return "works", _words(_meaning(meanings, schema, name))
    if not isinstance(mark, Refused):
        return "ignored", _words(mark.why)
    kept = " and ".join(f"`{json.dumps(value)}`" for value in mark.harmless)
    return "refused", _words(mark.why) + (f" ({kept} may be sent)" if kept else "")


def metrics_page(text: str) -> str:
    """Every metric with type, labels and help, as the text format tells them."""
    lines = [NOTE, "# Metrics", "", METRICS, "", _row(["name", "type", "labels", "meaning"]), _row(["---"] * 4)]
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    for name, help_text in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        sample = re.search(rf"^{re.escape(name)}(?:_bucket|_count)?(?:{{(.*?)}})? ", text, re.M)
        labels = re.findall(r'(\w+)="', sample[1] or "") if sample else []
        shown = ", ".join(f"`{label}`" for label in labels if label != "le")
        lines.append(_row([f"`{name}`", kinds[name], shown, _words(help_text)]))
    return "\n".join(lines) + "\n"


METRICS = """\
`GET /metrics` speaks Prometheus' text format 0.0.4. Where vLLM has a metric, its name is vLLM's, so that dashboards,
KEDA and the Kubernetes Gateway API Inference Extension work unchanged. Labels that name tenants or adapters are shown
to the admin key and keys of the role `metrics` only while authentication is on (`--metrics-names`); at most
`--metrics-tenants` tenants have series of their own. With `--redis-url` the tier `redis` joins the others."""


def _words(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("\n", " ")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
