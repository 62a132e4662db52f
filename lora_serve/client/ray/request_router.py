"""The request router that Ray Serve runs in each gateway: it obeys. `lora_serve/routing` has chosen before.

Serve pickles this module's class by value, so it may refer to other modules but have no state of its own here.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lora_serve.client.ray import registry


class ReplicaGoneError(Exception):
    """The replica that a call names takes no calls any more."""


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # Any to mypy
    """Sends each call to the replica that its argument `replica` names; to no other if it is gone."""

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
        for replica in self.curr_replicas.values():
            if replica.replica_id.unique_id == pending_request.kwargs.get("replica"):
                return replica
        raise ReplicaGoneError("the replica takes no calls any more")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`; tells the client too."""
        super().update_replicas(replicas)
        registry.update(self.app_name, [replica.replica_id.unique_id for replica in replicas])
