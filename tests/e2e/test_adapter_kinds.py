"""Every kind of adapter over HTTP, alone and composed, against PEFT: registered, shown, called, refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import Reply, call
from tests.e2e.test_bad_adapters import change_tensors
from tests.oracle import linear_names, load_alone, load_peft, load_plain, logprobs_with_peft, save_adapter

INVOCATION = [201, 17, 202]
PROMPT = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]
KINDS: Mapping[str, Mapping[str, Any]] = {
    "kinds/dora": {"use_dora": True},
    "kinds/saved": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "kinds/activated": {"alora_invocation_tokens": INVOCATION},
}


@pytest.fixture(scope="module")
def kinds(server: ServerProcess, site: Site) -> dict[str, Path]:
    """Folders by id; the server has all of them."""
    folders = {}
    for seed, (name, config) in enumerate(KINDS.items(), start=50):
        folders[name] = save_adapter(site.model, site.root / name, seed=seed, **config)
    change_tensors(folders["kinds/saved"], shake_head)
    for name, folder in folders.items():
        reply = register(server, name, folder)
        assert reply.status == 201, reply.text
    return folders


def shake_head(tensors: dict[str, torch.Tensor]) -> None:
    """The saved head is no longer the base's."""
    generator = torch.Generator().manual_seed(5)
    heads = [name for name in tensors if "lm_head" in name]
    assert len(heads) == 1
    tensors[heads[0]] += torch.randn(tensors[heads[0]].shape, generator=generator) * 0.1


def register(server: ServerProcess, name: str, folder: Path, **options: Any) -> Reply:
    return call(f"{server.url}/admin/adapters", {"id": name, "source": str(folder), **options}, ADMIN)


def ask(server: ServerProcess, ids: list[int] | list[list[int]], **fields: Any) -> Reply:
    body = {
        "prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True,
        "return_tokens_as_token_ids": True, **fields,
    }  # fmt: skip
    return call(f"{server.url}/v1/completions", body, ADMIN)


def tokens_of(reply: Reply, choice: int = 0) -> list[int]:
    assert reply.status == 200, reply.text
    logprobs = reply.json["choices"][choice]["logprobs"]
    return [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]


def check(model: Any, adapter: str | list[str] | None, ids: list[int], reply: Reply, choice: int = 0) -> None:
    """Each token is PEFT's best, and as likely as there. `model`: of `load_peft`."""
    tokens = tokens_of(reply, choice)
    if isinstance(adapter, list):
        model.base_model.set_adapter(adapter)
        with torch.inference_mode():
            truth = model(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits[0].log_softmax(-1)
    else:
        truth = logprobs_with_peft(model, adapter, ids + tokens)
    truth = truth[len(ids) - 1 : -1]
    assert tokens == truth.argmax(-1).tolist()
    found = reply.json["choices"][choice]["logprobs"]["token_logprobs"]
    assert found == pytest.approx(truth.max(-1).values.tolist(), abs=1e-3)


@contextmanager
def scaled(model: Any, scales: Mapping[str, float]) -> Iterator[None]:
    """PEFT with each adapter's scaling multiplied, layer by layer."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    known = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: layer.scaling[name] * scale for name, scale in scales.items()})
    try:
        yield
    finally:
        for layer, scaling in zip(layers, known, strict=True):
            layer.scaling.update(scaling)


@pytest.mark.parametrize("name", ["kinds/dora", "kinds/saved"])
def test_adapter_that_replaces_weights_answers_as_in_peft(
    server: ServerProcess, site: Site, kinds: dict[str, Path], name: str
) -> None:
    reply = ask(server, PROMPT, model=name)
    check(load_peft(site.model, {name: kinds[name]}), name, PROMPT, reply)
    assert tokens_of(reply) != tokens_of(ask(server, PROMPT))


def test_card_says_what_kind_it_is_and_what_it_changes(server: ServerProcess, kinds: dict[str, Path]) -> None:
    cards = {name: call(f"{server.url}/admin/adapters/{name}", headers=ADMIN).json for name in kinds}
    assert [(card["kinds"], card["composable"]) for card in cards.values()] == [
        (["use_dora"], False),
        (["modules_to_save"], False),
        (["alora_invocation_tokens"], True),
    ]
    assert cards["kinds/activated"]["invocation_tokens"] == INVOCATION
    assert all(card["probe"]["max_logit_change"] > 1e-3 for card in cards.values())
    assert len({card["base_fingerprint"] for card in cards.values()}) == 1


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapter_relative_to_a_changed_base_is_converted_once_and_answers_as_in_peft(
    server: ServerProcess, site: Site, init: str
) -> None:
    name = f"kinds/{init}"
    folder = save_adapter(site.model, site.root / name, seed=7, init_lora_weights=init)
    assert [register(server, name, folder).status for _ in range(2)] == [201, 200]
    check(load_alone(site.model, folder), "default", PROMPT, ask(server, PROMPT, model=name))
    card = call(f"{server.url}/admin/adapters/{name}", headers=ADMIN).json
    assert (card["version"], card["rank"], card["config"]["r"], card["composable"]) == (1, 8, 8, True)
    origin = card["config"]["converted_from"]
    assert (origin["init"], origin["r"], origin["digest"]) == (init, 4, adapter_digest(folder))
    assert ask(server, PROMPT, adapters=[{"id": name}, {"id": "acme/a", "scale": 0.5}]).status == 200


def test_activated_adapter_acts_only_after_its_invocation_tokens(
    server: ServerProcess, site: Site, kinds: dict[str, Path]
) -> None:
    name = "kinds/activated"
    oracle = load_peft(site.model, {name: kinds[name]})
    called = [*PROMPT, *INVOCATION, 40, 41]
    with_tokens, without = ask(server, called, model=name), ask(server, PROMPT, model=name)
    check(oracle, name, called, with_tokens)
    check(oracle, name, PROMPT, without)
    assert (with_tokens.headers["X-Adapter-Active"], without.headers["X-Adapter-Active"]) == ("1", "0")
    assert tokens_of(without) == tokens_of(ask(server, PROMPT))
    assert tokens_of(with_tokens) != tokens_of(ask(server, called))
    both = ask(server, [called, PROMPT], model=name)
    assert both.headers["X-Adapter-Active"] == "1/2"
    assert [tokens_of(both, choice) for choice in (0, 1)] == [tokens_of(with_tokens), tokens_of(without)]


@pytest.mark.parametrize(
    "scales",
    [
        {"acme/a": 1.0, "acme/b": 1.0},
        {"acme/a": 0.5, "globex/c": -0.75},
        {"acme/a": 0.25, "acme/b": 1.5, "globex/c": 0.5},
    ],
)
def test_composed_adapters_answer_as_pefts_sum_of_deltas(
    server: ServerProcess, site: Site, scales: dict[str, float]
) -> None:
    members = [{"id": name, "scale": scale} for name, scale in scales.items()]
    reply = ask(server, PROMPT, adapters=members)
    oracle = load_peft(site.model, {name: site.adapters[name] for name in scales})
    with scaled(oracle, scales):
        check(oracle, list(scales), PROMPT, reply)
    turned = ask(server, PROMPT, adapters=members[::-1])
    assert turned.json["choices"] == reply.json["choices"]
    assert reply.json["model"] == "+".join(scales)
    assert reply.headers["X-Adapter-Id"] == ",".join(scales)
    assert reply.headers["X-Adapter-Scale"] == ",".join(str(scale) for scale in scales.values())
    assert reply.headers["X-Adapter-Digest"].count("sha256:") == len(scales)


def test_one_adapter_may_be_scaled_and_scale_zero_is_the_base_model(server: ServerProcess, site: Site) -> None:
    oracle = load_peft(site.model, {"acme/b": site.adapters["acme/b"]})
    with scaled(oracle, {"acme/b": -2.0}):
        check(oracle, "acme/b", PROMPT, ask(server, PROMPT, adapters=[{"id": "acme/b", "scale": -2}]))
    check(oracle, None, PROMPT, ask(server, PROMPT, adapters=[{"id": "acme/b", "scale": 0}]))


def test_activated_member_acts_from_its_own_start_beside_another(
    server: ServerProcess, site: Site, kinds: dict[str, Path]
) -> None:
    """PEFT cannot mix the two, so its deltas are added by hand."""
    ids = [*PROMPT, *INVOCATION, 40]
    scales = {"kinds/activated": 0.8, "acme/a": 0.5}
    folders = {"kinds/activated": kinds["kinds/activated"], "acme/a": site.adapters["acme/a"]}
    reply = ask(server, ids, adapters=[{"id": name, "scale": scale} for name, scale in scales.items()])
    tokens = tokens_of(reply)
    plain = load_plain(site.model)
    for name, folder in folders.items():
        start = len(PROMPT) if name == "kinds/activated" else 0
        add_deltas(plain, load_peft(site.model, {name: folder}), name, scales[name], start)
    with torch.inference_mode():
        truth = plain(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits[0, len(ids) - 1 : -1]
    assert tokens == truth.argmax(-1).tolist()
    assert reply.headers["X-Adapter-Active"] == "1,1"


def add_deltas(plain: Any, adapted: Any, name: str, scale: float, start: int) -> None:
    """Let each layer of `plain` add scale * delta x to its output, from position `start` on."""
    for path, layer in adapted.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            delta = layer.get_delta_weight(name).detach() * scale

            def add(module: Any, inputs: Any, output: torch.Tensor, delta: torch.Tensor = delta) -> torch.Tensor:
                acts = (torch.arange(output.shape[1]) >= start)[None, :, None]
                return output + acts * (inputs[0] @ delta.T)

            plain.get_submodule(path).register_forward_hook(add)


def test_composed_and_plain_rows_do_not_disturb_each_other(server: ServerProcess, site: Site) -> None:
    fields = [
        {"model": "acme/a"},
        {"adapters": [{"id": "acme/a", "scale": 0.5}, {"id": "acme/b"}]},
        {},
        {"adapters": [{"id": "acme/b", "scale": -1}, {"id": "globex/c", "scale": 2}, {"id": "acme/a"}]},
    ]
    alone = [ask(server, PROMPT, **one).json["choices"] for one in fields]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda one: ask(server, PROMPT, **one).json["choices"], fields * 3))
    assert [one[0]["text"] for one in together] == [one[0]["text"] for one in alone] * 3


@pytest.mark.parametrize(("name", "kind"), [("kinds/dora", "use_dora"), ("kinds/saved", "modules_to_save")])
def test_adapter_that_replaces_weights_cannot_be_composed_or_scaled(
    server: ServerProcess, kinds: dict[str, Path], name: str, kind: str
) -> None:
    for members in ([{"id": "acme/a"}, {"id": name}], [{"id": name, "scale": 0.5}]):
        reply = ask(server, PROMPT, adapters=members)
        assert reply.status == 400
        assert name in reply.json["error"]["message"]
        assert kind in reply.json["error"]["message"]


def save_untrained(site: Site, folder: Path) -> Path:
    """As PEFT makes it: every lora_B is zero."""
    base = load_plain(site.model)
    config = peft.LoraConfig(r=4, target_modules=linear_names(base), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


def save_faint(site: Site, folder: Path) -> Path:
    """Not zero, and yet no logit of the base model moves."""
    save_adapter(site.model, folder, seed=3, r=2)
    change_tensors(folder, lambda tensors: [t.mul_(1e-12) for name, t in tensors.items() if "lora_B" in name])
    return folder


@pytest.mark.parametrize("save", [save_untrained, save_faint], ids=lambda save: save.__name__)
def test_adapter_that_changes_nothing_is_taken_only_if_asked_for(server: ServerProcess, site: Site, save: Any) -> None:
    name = f"noop/{save.__name__}"
    folder = save(site, site.root / name)
    refused = register(server, name, folder)
    assert refused.status == 422, refused.text
    assert "changes nothing" in refused.json["error"]["message"]
    assert ask(server, PROMPT, model=name).status == 404
    taken = register(server, name, folder, allow_noop=True)
    assert taken.status == 201, taken.text
    card = call(f"{server.url}/admin/adapters/{name}", headers=ADMIN).json
    assert card["probe"]["max_logit_change"] < 1e-4 < card["probe"]["max_logit"]
    assert tokens_of(ask(server, PROMPT, model=name)) == tokens_of(ask(server, PROMPT))
