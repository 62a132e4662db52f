"""Broken adapters against a real server: 422 in words, nothing registered, the neighbours' answers unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import Reply, call
from tests.oracle import save_adapter, save_tiny_model

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(sorted(tensors)[0]))


def wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({sorted(tensors)[0]: torch.ones(4, 5)}))


def not_a_number(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors[sorted(tensors)[0]].fill_(float("nan")))


def changes_nothing(folder: Path) -> None:
    change_tensors(folder, lambda tensors: [t.zero_() for name, t in tensors.items() if "lora_B" in name])


def truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])


def pickled(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / WEIGHTS)


def git_lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")


def unknown_tensor(folder: Path) -> None:
    change_tensors(
        folder,
        lambda tensors: tensors.update({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_C.weight": torch.ones(2)}),
    )


def dora_without_magnitudes(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))


BROKEN = {
    missing_tensor: "lora_",
    wrong_shape: "lora_A",
    not_a_number: "NaN",
    changes_nothing: "changes nothing",
    truncated: WEIGHTS,
    pickled: WEIGHTS,
    git_lfs_pointer: "LFS",
    unknown_tensor: "model.layers.0.self_attn.q_proj.lora_C.weight",
    dora_without_magnitudes: "magnitude of model.layers.0.mlp.down_proj is missing",
}


def ask(server: ServerProcess, model: str) -> Reply:
    body = {"model": model, "prompt": [9, 8, 7], "max_tokens": 4, "temperature": 0, "logprobs": 0}
    return call(f"{server.url}/v1/completions", body)


def register(server: ServerProcess, name: str, folder: Path) -> Reply:
    body: dict[str, Any] = {"id": name, "source": str(folder)}
    return call(f"{server.url}/admin/adapters", body, ADMIN)


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_broken_adapter_is_refused_and_neighbours_do_not_notice(
    server: ServerProcess, site: Site, damage: Callable[[Path], None]
) -> None:
    before = ask(server, "acme/a").json["choices"][0]
    folder = site.root / "broken" / damage.__name__
    shutil.copytree(site.adapters["acme/a"], folder)
    damage(folder)
    refused = register(server, f"broken/{damage.__name__}", folder)
    assert refused.status == 422, refused.text
    error = refused.json["error"]
    assert error["type"] == "invalid_adapter"
    assert BROKEN[damage] in error["message"]
    assert str(site.root) not in refused.text
    unknown = ask(server, f"broken/{damage.__name__}")
    assert unknown.status == 404
    assert ask(server, "acme/a").json["choices"][0] == before


def test_adapter_of_another_base_is_refused(server: ServerProcess, site: Site) -> None:
    other = save_tiny_model("llama", site.root / "other-model", hidden_size=48)
    refused = register(server, "broken/other", save_adapter(other, site.root / "broken" / "other"))
    assert refused.status == 422
    assert "shape" in refused.json["error"]["message"]


def test_folder_outside_the_roots_is_the_same_refusal_as_none(server: ServerProcess) -> None:
    folders = ("/etc", "/no/such/folder")
    outside, missing = (register(server, "x/y", Path(folder)) for folder in folders)
    assert outside.status == missing.status == 400
    words = [reply.text.replace(folder, "") for reply, folder in zip((outside, missing), folders, strict=True)]
    assert words[0] == words[1]
