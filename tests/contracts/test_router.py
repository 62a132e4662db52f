"""Every router's duty, whatever the fleet: each file of the folder is under this contract."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lora_serve.routing.routers as package
from lora_serve.core.settings import Settings
from lora_serve.routing.fleet_view import FleetView, RoutedRequest
from lora_serve.routing.routers import create_router
from tests.routing.fleets import fleets, requests, view_of

FOLDER = Path(str(package.__file__)).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "base"))
every_router = pytest.mark.parametrize("name", NAMES)


def test_files_are_the_values_of_the_setting() -> None:
    assert sorted(get_args(Settings.model_fields["router"].annotation)) == NAMES


def test_new_file_in_the_folder_is_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(
        "from lora_serve.routing.routers import base\n\n\n"
        "class Router(base.Router):\n"
        "    def choose(self, request, replicas):\n"
        "        return [state.replica for state in reversed(replicas)]\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        assert create_router("toy").choose(RoutedRequest("1"), view_of("a", "b").replicas) == ["b", "a"]
    finally:
        sys.modules.pop("lora_serve.routing.routers.toy", None)


@every_router
@given(view=fleets(), request=requests())
def test_all_replicas_are_named_once(name: str, view: FleetView, request: RoutedRequest) -> None:
    found = create_router(name).choose(request, view.replicas)
    assert sorted(found) == sorted(state.replica for state in view.replicas)


@every_router
def test_no_replica_no_choice(name: str) -> None:
    assert create_router(name).choose(RoutedRequest("1", ("a",)), []) == []


@every_router
@given(view=fleets(), asked=st.lists(requests(), min_size=1, max_size=8))
def test_equal_seeds_choose_alike(name: str, view: FleetView, asked: list[RoutedRequest]) -> None:
    one, other = create_router(name, 7), create_router(name, 7)
    for request in asked:
        assert one.choose(request, view.replicas) == other.choose(request, view.replicas)


@every_router
@given(view=fleets(min_size=2), asked=st.lists(requests(), min_size=1, max_size=8))
def test_removed_replica_is_never_chosen(name: str, view: FleetView, asked: list[RoutedRequest]) -> None:
    router = create_router(name)
    router.choose(asked[0], view.replicas)
    gone = view.replicas[0].replica
    view.remove(gone)
    for request in asked:
        assert gone not in router.choose(request, view.replicas)


@every_router
@given(view=fleets(), request=requests())
def test_choosing_changes_nothing(name: str, view: FleetView, request: RoutedRequest) -> None:
    before = [(state.replica, state.load, state.num_requests) for state in view.replicas]
    create_router(name).choose(request, view.replicas)
    assert [(state.replica, state.load, state.num_requests) for state in view.replicas] == before
