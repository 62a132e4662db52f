"""What a cluster for measurements gives to its nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.fleet.cluster import own_token


def test_nodes_get_a_token_and_nothing_that_another_cluster_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first of these no host joins: Ray takes the cluster for one of a single machine."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    left = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_TOKEN_PATH": "/elsewhere"}
    for name, text in left.items():
        monkeypatch.setenv(name, text)
    with own_token(tmp_path):
        within = _variables_of_ray()
    assert within == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert len((tmp_path / "token").read_text()) == 64
    assert _variables_of_ray() == left


def _variables_of_ray() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("RAY_")}
