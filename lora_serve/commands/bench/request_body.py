"""Makes the HTTP body of a planned request for a target."""

from __future__ import annotations

from typing import Any

from lora_serve.commands.bench.plan import PlannedRequest, Target

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def request_url(target: Target) -> str:
    return target.root + PATHS[target.endpoint]


def request_headers(target: Target, request: PlannedRequest) -> dict[str, str]:
    headers = {"Content-Type": "application/json", **target.headers}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    if target.adapter_field == "header" and request.adapter is not None:
        headers["X-Adapter-Id"] = request.adapter
    return headers


def request_body(target: Target, request: PlannedRequest, index: int = 0) -> dict[str, Any]:
    """The body of a greedy, streamed request, the `index`th. Raises ValueError for token ids on the chat endpoint."""
    body: dict[str, Any] = {"model": target.model, **_prompt(target, request), "max_tokens": request.output_tokens}
    body |= {"temperature": 0, "stream": True, **_adapter(target, request.adapter)}
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.usage != "none":
        body["stream_options"] = {"include_usage": True}
    if target.usage == "continuous":
        body["stream_options"]["continuous_usage_stats"] = True
    if target.response_formats:
        body["response_format"] = target.response_formats[index % len(target.response_formats)]
    return body | dict(target.extra_body)


def _prompt(target: Target, request: PlannedRequest) -> dict[str, Any]:
    if target.endpoint == "completions":
        return {"prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt)}
    if not isinstance(request.prompt, str):
        raise ValueError("chat takes text, not token ids")
    return {"messages": [{"role": "user", "content": request.prompt}]}


def _adapter(target: Target, adapter: str | None) -> dict[str, Any]:
    if target.adapter_field == "llama-cpp":
        none = {"id": 0, "scale": 0.0}  # an empty list would mean the server's own default: all of them
        return {"lora": [none if adapter is None else {"id": _number(target, adapter), "scale": 1.0}]}
    if adapter is None or target.adapter_field == "header":
        return {}
    return {target.adapter_field: adapter}


def _number(target: Target, adapter: str) -> int:
    return target.adapter_ids[adapter] if adapter in target.adapter_ids else int(adapter)
