"""Answers of two trees' servers, byte for byte: `python -m benchmarks.same_answers --other PATH`.

Both serve the bundled model, then the same weights as an embedding model and as a classifier. They are sent the same
requests in the same order, made from a seed: all families of the API, streamed and not, right and wrong. Numbers that
no two servers share (times, random ids, memory) are masked; status, content type and every other byte must agree.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from lora_serve.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
DATA = Path("lora_serve", "demo_data")
ADAPTERS = ("acme/sql", "harbor/extract", "lumen/support", "pulse/sentiment", "summit/tools", "tidewater/pirate")
SHOWN = 10  # differing pairs
KEY = "admin-key-of-the-comparison"
WORDS = (
    "When is the invoice due?", "Order 2041, please", "Größe: 3 µm — naïve café", "日本語と😀", 'say "no"\\\n\ttab',
    "The weather in Oslo", "<b>&amp;</b>", "x" * 40, "SELECT", "\x7f\u2028 odd",
)  # fmt: skip
# Behind these names stands what no two servers share: times, keys, what depends on which rows shared a step.
OWN = (
    "created|created_at|started|ready_since|last_used|expires|revoked|time|from|to|[a-z_]*seconds|[a-z_]+_ms|pid|key|"
    "secret|line_digest|last_id|step_cost_us|step_cost_error|measured|reason|in_force|requests_per_minute|"
    "steps_by_tokens|num_step_tokens|recent_batches|cached_tokens|cache_read_input_tokens|input_tokens|last_load|num_steps|num_prefix_hits|memory|hits|misses|num_masks|num_forced"
)
MASKS = (
    (re.compile(rf'"({OWN})": ?({{[^{{}}]*}}|\[[^\[\]]*\]|"[^"]*"|[^,}}\]]+)'.encode()), rb'"\1":M'),
    (re.compile(rb"call_[0-9a-f]{24}|[0-9]{14}-[0-9a-f]{8}-[0-9]{9}|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"), b"ID"),
    (re.compile(rb'[a-z0-9]{12}(?=", "object": "api_key")|(?<=/)[a-z0-9]{12}(?=")'), b"ID"),
    (re.compile(rb"(?<=,)[0-9.]+(?=[,\r])"), b"N"),  # of CSV
    (re.compile(rb'"version": ?"[0-9]+\.[0-9]+\.[0-9]+"'), b'"version":M'),  # of the program
)
CHOICE = re.compile(rb'"choices":\[{"index":([0-9]+)')


class Call(NamedTuple):
    method: str
    path: str
    body: Any = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--other", type=Path, required=True, help="the other tree")
    parser.add_argument("--count", type=int, default=5000, help="requests, of all models together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, num_differing = random.Random(options.seed), 0
    for task, share in (("generate", 0.8), ("embed", 0.1), ("classify", 0.1)):
        calls = list(made_calls(task, dice, int(options.count * share)))
        with tempfile.TemporaryDirectory(prefix="same_answers_") as folder, ExitStack() as stack:
            model, trees = model_for(task, Path(folder)), {"this": ROOT, "other": options.other.resolve()}
            made = (served(tree, task, model, Path(folder, name)) for name, tree in trees.items())
            servers = [stack.enter_context(one) for one in made]
            num_differing += compared(task, servers, calls)
    return 1 if num_differing else 0


def model_for(task: str, folder: Path) -> Path:
    """The bundled model; for a classifier with a head of three labels."""
    source = ROOT / DATA / "model"
    if task != "classify":
        return source
    made = shutil.copytree(source, folder / "classifier")
    config = json.loads((made / "config.json").read_text())
    labels = {str(index): name for index, name in enumerate(("bad", "fair", "göod"))}
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    (made / "config.json").write_text(json.dumps(config))
    weights = load_file(made / "model.safetensors")
    torch.manual_seed(0)
    weights["score.weight"] = 4 * torch.randn(3, config["hidden_size"]).to(torch.bfloat16)  # odds from 1e-9 to 1
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


@contextmanager
def served(tree: Path, task: str, model: Path, folder: Path) -> Iterator[ServerProcess]:
    """A server of the tree's code. Its own settings and state are in `folder`."""
    folder.mkdir()
    arguments = ["--model", str(model), "--served-model-name", "base", "--task", task, "--store", str(folder / "store")]
    arguments += ["--adapter-root", str(ROOT / DATA / "adapters"), "--admin-key", KEY, "--engine", "thread"]
    arguments += ["--warmup", "off", "--speculate", "off", "--admin-acts-per-minute", "0"]
    inside = ("env", "-C", str(tree), f"PYTHONPATH={tree}", f"XDG_STATE_HOME={folder}")
    with ServerProcess(arguments, folder / "server.log", inside=inside) as server:
        server.wait_until_ready(120)
        yield server


def compared(task: str, servers: Sequence[ServerProcess], calls: Sequence[Call]) -> int:
    """Sends the calls to both servers; returns how many answers differ, and shows the first."""
    num_differing, statuses = 0, Counter[int]()
    with ThreadPoolExecutor(2) as threads:
        for number, call in enumerate(calls):
            ours, theirs = threads.map(lambda server: sent(server, call, number), servers)  # noqa: B023 (used at once)
            statuses[ours[0]] += 1
            num_differing += ours != theirs
            if ours != theirs and num_differing <= SHOWN:
                at = next((i for i, (a, b) in enumerate(zip(ours[2], theirs[2], strict=False)) if a != b), 0)
                near = slice(max(0, at - 150), at + 150)
                print(f"{call}\n  this:  {ours[:2]} {ours[2][near]!r}\n  other: {theirs[:2]} {theirs[2][near]!r}")
    print(f"{task}: {len(calls)} pairs, {num_differing} differ; statuses {dict(sorted(statuses.items()))}", flush=True)
    return num_differing


def sent(server: ServerProcess, call: Call, number: int) -> tuple[int, str, bytes]:
    """The answer's status, media type and masked body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": f"req-{number}", "Content-Type": "application/json"}
    body = call.body if isinstance(call.body, bytes | None) else json.dumps(call.body).encode()
    connection.request(call.method, call.path, body, headers)
    response = connection.getresponse()
    data = response.read()
    for pattern, put in MASKS:
        data = pattern.sub(put, data)
    if CHOICE.search(data):  # choices of one stream come in any order
        data = b"\n".join(sorted(data.split(b"\n"), key=lambda line: (CHOICE.findall(line) or [b""])[0]))
    return response.status, response.headers.get("Content-Type", ""), data


def made_calls(task: str, dice: random.Random, count: int) -> Iterator[Call]:
    """The adapters' registrations, then requests of what the task serves, then one look at every list."""
    if task == "generate":
        for name in ADAPTERS:
            facts = {"source": str(ROOT / DATA / "adapters" / name), "metadata": {"näme": [1.0, None]}}
            yield Call("POST", "/admin/adapters", {"id": name, **facts})
    for _ in range(count):
        if (kind := dice.random()) < 0.3:
            yield plain_call(dice) if kind < 0.2 else admin_call(dice)
        elif task == "generate":
            yield generation_call(dice)
        else:
            yield pooling_call(dice, "/v1/embeddings" if task == "embed" else "/classify")
    yield from (Call("GET", path) for path in ("/openapi.json", "/admin/adapters", "/admin/tenants", "/v1/models"))


def generation_call(dice: random.Random) -> Call:
    """A request that generates, by one of five routes."""
    path = dice.choice(("chat/completions", "chat/completions", "completions", "responses", "messages", "generate"))
    limit, text = dice.choice((1, 3, 12)), dice.choice(WORDS)
    body: dict[str, Any] = {"model": dice.choice(("base", "base", *ADAPTERS)), "temperature": 0.0}
    if dice.random() < 0.3:
        body |= {"temperature": dice.choice((0.7, 1e-05)), "seed": dice.randrange(99), "top_p": 0.95}
    if dice.random() < 0.5:
        body["stream"] = True
    tools = json.loads((ROOT / DATA / "tools.json").read_text())
    if path in ("completions", "chat/completions"):
        body["max_tokens"] = limit
        some = {"stop": [" ", "e"], "n": 2, "echo": True, "return_token_ids": True, "ignore_eos": True,
                "return_tokens_as_token_ids": True, "prompt_logprobs": 2}  # fmt: skip
        body |= {name: some[name] for name in some if dice.random() < 0.15}
        if body.get("stream") and dice.random() < 0.5:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.5}
    if path == "completions":
        body |= {"prompt": dice.choice((text, [text, "Two"], [5, 6, 7], [[5, 6], [7]]))}
        body |= {"logprobs": dice.choice((0, 1, 5))} if dice.random() < 0.4 else {}
        return Call("POST", "/v1/completions", body)
    if path == "generate":
        sampling = {"max_tokens": limit, "temperature": body.pop("temperature"), "logprobs": dice.choice((None, 2))}
        body |= {"token_ids": [5, 9, dice.randrange(2000)], "sampling_params": sampling}
        return Call("POST", "/inference/v1/generate", body)
    if path == "chat/completions":
        body["messages"] = [{"role": "user", "content": text}]
        body |= {"logprobs": True, "top_logprobs": dice.choice((0, 3))} if dice.random() < 0.4 else {}
        body |= {"tools": tools, "max_tokens": 60, "model": "summit/tools"} if dice.random() < 0.3 else {}
        body |= {"tool_choice": dice.choice(("auto", "required"))} if "tools" in body else {}
        body |= {"response_format": {"type": "json_object"}} if dice.random() < 0.1 else {}
        return Call("POST", "/v1/chat/completions", body)
    if path == "responses":
        body |= {"input": text, "max_output_tokens": limit, "metadata": {"é": "1"}, "instructions": "Be brief."}
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if dice.random() < 0.4 else {}
        if dice.random() < 0.3:
            given = [{"type": "function", **tool["function"]} for tool in tools]
            body |= {"tools": given, "tool_choice": "required", "max_output_tokens": 60, "model": "summit/tools"}
        return Call("POST", "/v1/responses", body)
    body |= {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
    body |= {"stop_sequences": ["e"]} if dice.random() < 0.2 else {}
    body |= {"context_management": {}} if dice.random() < 0.1 else {}
    if dice.random() < 0.3:
        given = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]
        body |= {"tools": given, "tool_choice": {"type": "any"}, "max_tokens": 60, "model": "summit/tools"}
    return Call("POST", dice.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens")), body)


def pooling_call(dice: random.Random, path: str) -> Call:
    """A request that embeds, classifies or compares; the classifier has too many labels to score."""
    text, kind = dice.choice(WORDS), dice.randrange(6)
    if kind == 0:
        return Call("POST", "/rerank", {"query": text, "documents": WORDS[:5], "return_documents": dice.random() < 0.5})
    if kind == 1:
        return Call("POST", "/score", {"text_1": text, "text_2": [dice.choice(WORDS), "Two"]})
    more = {"encoding_format": "base64", "dimensions": 64, "model": "base", "use_activation": False}
    more = {name: more[name] for name in more if dice.random() < 0.25}
    return Call("POST", path, {"input": dice.choice((text, list(WORDS), [3, 4, 5])), **more})


def plain_call(dice: random.Random) -> Call:
    """Tokens, models, probes; and what is refused."""
    wrong = dice.choice((b"{", b"[]", b'{"prompt": "\\ud800"}', {"prompt": 1}, {"model": "nobody/ü", "prompt": "a"}))
    looks = ("/tokenizer_info", "/health", "/ready", "/version", "/ui/about.json", "/", "/v1/models", "/v1/models/base",
             "/v1/models/acme/sql", "/v1/models/none")  # fmt: skip
    calls = (
        Call("POST", "/tokenize", {"prompt": dice.choice(WORDS), "return_token_strs": dice.random() < 0.5}),
        Call("POST", "/tokenize", {"messages": [{"role": "user", "content": dice.choice(WORDS)}]}),
        Call("POST", "/detokenize", {"tokens": [dice.randrange(2000) for _ in range(5)]}),
        Call("GET", dice.choice(looks)),
        Call("POST", dice.choice(("/v1/completions", "/v1/messages", "/v1/embeddings", "/admin/tenants")), wrong),
        Call("DELETE", dice.choice(("/v1/models/none", "/v1/chat/completions", "/nowhere"))),
    )
    return dice.choice(calls)


def admin_call(dice: random.Random) -> Call:
    """An act, or a look."""
    name, tenant = dice.choice(ADAPTERS), dice.choice(("t1", "t2", "acme"))
    of_tenant, alias = f"/admin/tenants/{tenant}", f"/admin/aliases/{tenant}/alias"
    quota = {"requests_per_minute": dice.choice((5, None)), "max_stored_bytes": "2GB"}
    looks = ("/admin/engine", "/admin/engine/health", "/admin/fleet", f"/admin/fleet?adapter={name}", "/admin/whoami",
             "/admin/aliases", "/admin/registrations", f"/admin/adapters/{name}", "/admin/adapters?limit=2",
             "/admin/adapters?fields=summary&sort=-rank", "/admin/tenants", of_tenant, f"{of_tenant}/use",
             f"{of_tenant}/keys", "/admin/audit?limit=3", "/admin/usage?by=adapter,tenant",
             "/admin/usage?format=csv")  # fmt: skip
    acts = (
        Call("POST", "/admin/tenants", {"name": tenant, "quota": quota}),
        Call(dice.choice(("PATCH", "DELETE")), of_tenant, {"quota": quota, "offload": False}),
        Call("POST", f"{of_tenant}/keys", {"role": "inference", "label": "ä", "expires_in": 99}),
        Call(dice.choice(("PUT", "PUT", "DELETE")), alias, {"target": name}),
        Call("PATCH", f"/admin/adapters/{name}", {"metadata": {"é": 1e-05, "big": 2**70}, "defaults": {"top_k": 5}}),
        Call("POST", f"/admin/adapters/{name}/{dice.choice(('pin', 'unpin', 'prefetch', 'evict', 'rollback'))}"),
        Call("PUT", f"/admin/adapters/{name}/route", {"version": dice.choice((1, 7)), "canary": None}),
        Call("PUT", f"/admin/adapters/{name}/sharing", {"shared_with": dice.choice((["*"], [], ["t1"]))}),
        Call("PUT", "/admin/engine", {"max_num_seqs": dice.choice((8, 9, 0)), "batch_wait_ms": 0}),
    )
    return Call("GET", dice.choice(looks)) if dice.random() < 0.5 else dice.choice(acts)


if __name__ == "__main__":
    sys.exit(main())
