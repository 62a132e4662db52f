"""A request as a router sees it; names of prompts' beginnings, by which their K and V are found in a fleet.

Gateways and replicas work out these names alike:

    root[k] = H_key(tenant, the first 64 * 4 ** k tokens, adapters that act on any of these)

The key is the fleet's, made at its start and known to its gateways and replicas alone: a root that is seen outside says
nothing about a prompt. No two tenants share a root, so that none can tell from the time to its first token what
another has sent (a replica's own prefix cache goes by keys of its own and is not touched by any of this). A root that
two prompts share by chance (64 bits) costs a detour, nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from lora_serve.core.request import InferenceRequest

SHORTEST = 64  # tokens; a multiple of any block size in use
_GROWTH = 4  # of the next root's tokens
_MOST = 4  # roots of one prompt: of 64, 256, 1024 and 4096 tokens
_ROOT_BYTES = 8


def prefix_roots(request: InferenceRequest, key: bytes) -> tuple[int, ...]:
    """The roots of a request's prompt, the shortest first; none if the prompt is short or leaves no K and V.

    `key`: at most 64 bytes, the same in the whole fleet.
    """
    if request.pooling is not None or len(request.prompt_token_ids) < SHORTEST:
        return ()
    owner = request.scope.encode()
    running = blake2b(len(owner).to_bytes(8, "big") + owner, key=key, digest_size=_ROOT_BYTES)
    roots: list[int] = []
    start, end = 0, SHORTEST
    while end <= len(request.prompt_token_ids) and len(roots) < _MOST:
        running.update(array("q", request.prompt_token_ids[start:end]).tobytes())
        whole = running.copy()
        acting = sorted((use.ref.digest, use.scale, use.start) for use in request.adapters if use.start < end)
        whole.update(repr(acting).encode())
        roots.append(int.from_bytes(whole.digest(), "big"))
        start, end = end, end * _GROWTH
    return tuple(roots)


class RecentRoots:
    """The last roots of a replica: its host adds a request's once its prompt is computed."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._roots: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    def add(self, roots: Iterable[int]) -> None:
        """Notes the roots as the last ones used."""
        for root in roots:
            self._roots[root] = None
            self._roots.move_to_end(root)
        while len(self._roots) > self._most:
            self._roots.popitem(last=False)

    def __contains__(self, root: int) -> bool:
        return root in self._roots

    @property
    def roots(self) -> tuple[int, ...]:
        """The roots, the longest unused first."""
        return tuple(self._roots)


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
