"""What every line of log written for a request says of it."""

from __future__ import annotations

from lora_serve.server.context import RequestContext


def log_fields(context: RequestContext) -> dict[str, object]:
    """As far as it is known by now; `-` and None: nobody, nothing, or not yet. Never a prompt, never a key."""
    answerer = context.answerer
    return {
        "request_id": context.request_id,
        "tenant": context.caller.tenant if context.caller else "-",
        "adapter": answerer.label if answerer else "-",
        "digest": "+".join(answerer.digests) if answerer else None,
    }
