"""The request router that Ray Serve runs in each gateway: it obeys. `lora_serve/routing` has chosen before.

Serve pickles this module's class by value, so it may refer to other modules but have no state of its own here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lora_serve.client.ray import serve_transport

MOST_LEAVING = 64  # replicas that are remembered


class ReplicaGoneError(Exception):
    """The replica that a call names takes no calls any more."""


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # Any to mypy
    """Sends each call to the replica that its argument `replica` names; to no other if it is gone."""

    def initialize_state(self, **fields: Any) -> None:
        """See `RequestRouter`: called once, first."""
        self._leaving: OrderedDict[str, RunningReplica] = OrderedDict()  # listed no longer; gateways finish there

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: the replica that is named, if it is there."""
        name = None if pending_request is None else pending_request.kwargs.get("replica")
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == name]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """In place of Serve's queue of pending requests, its probes and its waiting: there is nothing to decide."""
        if is_retry:  # else Serve would try again at once, and for ever
            raise ReplicaGoneError("the replica does not answer")
        name = pending_request.kwargs.get("replica")
        for replica in (*self.curr_replicas.values(), *self._leaving.values()):
            if replica.replica_id.unique_id == name:
                return replica
        raise ReplicaGoneError("the replica takes no calls any more")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`; tells the client too."""
        before = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
        super().update_replicas(replicas)
        listed = [replica.replica_id.unique_id for replica in replicas]
        self._leaving.update({name: replica for name, replica in before.items() if name not in listed})
        while len(self._leaving) > MOST_LEAVING:
            self._leaving.popitem(last=False)
        serve_transport.list_replicas(self.app_name, listed)
