"""What each object of the registry answers to each act, one after the other: models for `linearizability.check`."""

from __future__ import annotations

from typing import Any

from tests.stateful.expected import Adapter, Expected

Act = tuple[Any, ...]
NAME = "acme/x"  # of the one id in a model of the registry's own tests


def adapter(state: Any, act: Act) -> tuple[Any, Any]:
    """One id, by the model that the registry's stateful tests have. Contents are numbers.

    ("register", content, activate), ("set_route", version, None), ("roll_back",), ("delete", version or None): answers
    are statuses. ("show",): (versions, route), ("serve",): the content; None if there is no such id.
    """
    verb, *arguments = act
    if verb == "show":
        return state, state and (state[0], state[2])
    if verb == "serve":
        return state, state and dict(state[0])[state[2]]
    expected = Expected()
    if state is not None:
        versions, last, route, history = state
        expected.adapters[NAME] = Adapter(False, dict(versions), last, route, None, list(history))
    if verb == "register":
        arguments.append(False)  # no pin
    status = getattr(expected, verb)(NAME, *arguments)
    found = expected.adapters.get(NAME)
    if found is None:
        return None, status
    return (tuple(found.versions.items()), found.last_version, found.route, tuple(found.history)), status


def alias(state: Any, act: Act) -> tuple[Any, Any]:
    """One alias of ids that are always there. ("set", content), ("remove",): statuses; ("serve",): the content."""
    match act:
        case ("set", content):
            return content, 200
        case ("remove",):
            return None, 404 if state is None else 200
        case _:
            return state, state


def tenant(state: Any, act: Act) -> tuple[Any, Any]:
    """One tenant with its keys: None, or a set of (key, whether it is open).

    ("create",), ("delete",), ("make", key), ("revoke", key): statuses. ("knock", key): whether it is let in.
    """
    match act:
        case ("create",):
            return (frozenset(), 201) if state is None else (state, 409)
        case ("delete",):
            return None, 404 if state is None else 200
        case ("knock", key):
            return state, state is not None and (key, True) in state
        case ("make", key):
            return (state, 404) if state is None else (state | {(key, True)}, 201)
        case ("revoke", key):
            known = state is not None and {(key, True), (key, False)} & state
            return (state - {(key, True)} | {(key, False)}, 200) if known else (state, 404)
    raise AssertionError(act)
