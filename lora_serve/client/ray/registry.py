"""Where a client meets the request router that Ray Serve makes for it: by the application's name.

Serve constructs routers itself, from a pickle of their class, so neither can be handed to the other. Hence this
module-level state, which is written and read on the event loop alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

Listener = Callable[[Collection[str]], None]
_listeners: dict[str, Listener] = {}
_listed: dict[str, tuple[str, ...]] = {}


def listen(application: str, listener: Listener) -> None:
    """Calls `listener` with the names of the application's running replicas, now if they are known, and later on."""
    _listeners[application] = listener
    if application in _listed:
        listener(_listed[application])


def forget(application: str) -> None:
    """Ends `listen`."""
    _listeners.pop(application, None)
    _listed.pop(application, None)


def update(application: str, replicas: Collection[str]) -> None:
    """Called by the router with all replicas that take requests."""
    _listed[application] = tuple(replicas)
    if application in _listeners:
        _listeners[application](_listed[application])
