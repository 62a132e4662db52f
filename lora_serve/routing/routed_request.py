"""A request as a router sees it."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.request import InferenceRequest
from lora_serve.routing.prefix_roots import prefix_roots


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The facts of a request that decide where it runs best."""

    request_id: str
    digests: tuple[str, ...] = ()  # of its adapters, sorted; none: the base model
    num_prompt: int = 0  # tokens
    num_output: int = 0  # tokens, as expected
    roots: tuple[int, ...] = ()  # of its prompt's beginnings, the shortest first

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


def routed(request: InferenceRequest, key: bytes | None, num_output: int = 0) -> RoutedRequest:
    """The request as routers see it.

    `key`: see `prefix_roots`; None where replicas keep no prefixes. `num_output`: the tokens that are expected of it.
    """
    digests = tuple(sorted({ref.digest for ref in request.refs}))
    num_prompt = len(request.prompt_token_ids)
    roots = prefix_roots(request, key) if key is not None else ()
    return RoutedRequest(request.request_id, digests, num_prompt, num_output, roots)
