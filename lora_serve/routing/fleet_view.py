"""A gateway's view of its fleet: replicas' last reports, and requests, as routers see them, that it sent itself.

Gateways of one fleet do not talk to each other: each knows its own requests at once, and the others' by the reports.
"""

from __future__ import annotations

import enum
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import ReplicaReport

SHORTEST = 64  # tokens of the shortest root; a multiple of any block size in use
_GROWTH = 4  # of the next root's tokens
_MOST = 4  # roots of one prompt: of 64, 256, 1024 and 4096 tokens
_ROOT_BYTES = 8
_LEARNING_RATE = 0.02  # of the mean length of an answer


def prefix_roots(request: InferenceRequest, key: bytes) -> tuple[int, ...]:
    """Names of a prompt's beginnings, the shortest first, by which their K and V are found in a fleet; none if the
    prompt is short or leaves no K and V. Gateways and replicas work them out alike:

        root[k] = H_key(tenant, the first 64 * 4 ** k tokens, adapters that act on any of these)

    `key`: at most 64 bytes, made at the fleet's start and known to its gateways and replicas alone: a root that is seen
    outside says nothing about a prompt. No two tenants share a root, so that none can tell from the time to its first
    token what another has sent (a replica's own prefix cache goes by keys of its own and is not touched by any of
    this). A root that two prompts share by chance (64 bits) costs a detour, nothing else.
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


class Tier(enum.IntEnum):
    """The place of an adapter on a replica: the lower, the sooner a row can use it."""

    DEVICE = 0
    HOST = 1
    LOADING = 2
    NONE = 3


class ReplicaView:
    """Routers read it. The own requests are counted at once, other gateways' as the last report tells them."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.report: ReplicaReport | None = None  # None: none has come yet
        self._open: dict[str, RoutedRequest] = {}  # own, by request id
        self._in_prompt: dict[str, int] = {}  # of these, those without a first token: the prompt's tokens
        self._num_prompt = 0  # tokens: sums over these
        self._num_output = 0
        self._others_requests = 0
        self._others_tokens = 0
        self._tiers: dict[str, Tier] = {}
        self._roots: frozenset[int] = frozenset()
        self._sent_roots = RecentRoots()  # since the report

    @property
    def num_requests(self) -> int:
        """The requests under way there."""
        return len(self._open) + self._others_requests

    @property
    def load(self) -> int:
        """The tokens that are still to be computed there: prompts without a first token, and answers as expected."""
        return self._num_prompt + self._num_output + self._others_tokens

    def tier(self, digests: Iterable[str]) -> Tier:
        """The worst place of several adapters; DEVICE if there are none."""
        return max((self._tiers.get(digest, Tier.NONE) for digest in digests), default=Tier.DEVICE)

    def num_known_roots(self, roots: Iterable[int]) -> int:
        """The number of a prompt's beginnings that it has probably computed."""
        return sum(root in self._roots or root in self._sent_roots for root in roots)

    def take(self, report: ReplicaReport) -> None:
        """Takes in a report, unless a later one came first, or this one: it is sent again during a long step."""
        if self.report is not None and report.made_at <= self.report.made_at:
            return
        self.report = report
        self._tiers = _tiers_of(report)
        self._roots = frozenset(report.prefix_roots)
        self._sent_roots = RecentRoots()
        for request in self._open.values():  # the report may be older than they are
            self._note(request)
        self._others_requests = max(0, report.num_running + report.num_waiting - len(self._open))
        self._others_tokens = max(0, report.waiting_tokens - self._num_prompt) if self._others_requests else 0

    def sent(self, request: RoutedRequest) -> None:
        """Counts a request of this gateway."""
        self._open[request.request_id] = request
        self._in_prompt[request.request_id] = request.num_prompt
        self._num_prompt += request.num_prompt
        self._num_output += request.num_output
        self._note(request)

    def answering(self, request: RoutedRequest) -> None:
        """The first token came: the prompt is no work any more."""
        self._num_prompt -= self._in_prompt.pop(request.request_id, 0)

    def ended(self, request: RoutedRequest) -> None:
        """Counts the request no longer, however it ended."""
        self.answering(request)
        found = self._open.pop(request.request_id, None)
        self._num_output -= found.num_output if found is not None else 0

    def _note(self, request: RoutedRequest) -> None:
        """What the replica will have because of a request."""
        for digest in request.digests:
            self._tiers.setdefault(digest, Tier.LOADING)
        self._sent_roots.add(request.roots)


def _tiers_of(report: ReplicaReport) -> dict[str, Tier]:
    """The best place of each adapter."""
    tiers = dict.fromkeys(report.loading, Tier.LOADING)
    tiers |= dict.fromkeys(report.host, Tier.HOST)
    return tiers | dict.fromkeys(report.device, Tier.DEVICE)


class FleetView:
    """The states of the replicas that may be chosen: draining and dead ones are removed.

    Not thread-safe: one event loop uses it. Messages about a replica that is not (or no longer) one are ignored.
    """

    def __init__(self) -> None:
        self._states: dict[str, ReplicaView] = {}
        self._answer_tokens: float | None = None  # a running mean; None: no answer has ended yet

    @property
    def replicas(self) -> list[ReplicaView]:
        """All states, in the order in which they were added."""
        return list(self._states.values())

    def add(self, replica: str) -> None:
        """Takes in a replica; one that is known stays as it is."""
        self._states.setdefault(replica, ReplicaView(replica))

    def remove(self, replica: str) -> None:
        """Forgets a replica."""
        self._states.pop(replica, None)

    def update(self, report: ReplicaReport) -> None:
        """Takes in a report."""
        if report.replica in self._states:
            self._states[report.replica].take(report)

    def sent(self, replica: str, request: RoutedRequest) -> None:
        """Counts a request that this gateway has sent."""
        if replica in self._states:
            self._states[replica].sent(request)

    def answering(self, replica: str, request: RoutedRequest) -> None:
        """The request's first token came from the replica."""
        if replica in self._states:
            self._states[replica].answering(request)

    def ended(self, replica: str, request: RoutedRequest, num_output: int | None = None) -> None:
        """The request is over there: it ended well, with so many tokens, or badly, or its client left."""
        if replica in self._states:
            self._states[replica].ended(request)
        if num_output is not None:
            mean = num_output if self._answer_tokens is None else self._answer_tokens
            self._answer_tokens = mean + _LEARNING_RATE * (num_output - mean)

    def expected_output(self, max_tokens: int) -> int:
        """The tokens of an answer that may have so many, as the last answers tell."""
        return max_tokens if self._answer_tokens is None else min(max_tokens, round(self._answer_tokens))
