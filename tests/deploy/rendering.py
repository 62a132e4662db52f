"""The chart as Helm renders it with the values of its examples, and with what the tests add."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "lora-serve"
EXAMPLES = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((CHART / "examples").glob("*.yaml"))}
PLAIN: dict[str, Any] = {"secret": {"name": "keys"}, "model": {"persistentVolumeClaim": {"claimName": "models"}}}
# Beside the examples: everything that is off in them is on in one of these.
MORE: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "hpa": PLAIN | {"autoscaling": {"mode": "hpa", "waitingTokensPerReplica": 1_000_000}},
    "tls": PLAIN
    | {
        "tls": {"secretName": "cert"},
        "secret": {"name": "keys", "apiKey": "api-key"},
        "serviceMonitor": {"enabled": True},
        "extraArgs": ["--max-loras", "7"],
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    },
    "settings": PLAIN
    | {
        "settings": {
            "max_upload_size": 4_000_000_000,
            "speculate": "off",
            "enable_prefix_caching": False,
            "fuse_layers": True,
            "tenant_weight": ["acme=2", "lumen=1"],
            "adapter_tenant_floor": 0.25,
            "adapter_host_memory": "4GiB",
            "overflow": "gpu=http://10.0.0.7:8000",
            "max_loras": "32",
            "auth": True,
            "warmup": False,
            "overflow_model_map": ["acme/*=*", "base=big"],
        },
        "secret": {"name": "keys", "overflowKey": "neighbours"},
    },
    "fleet": PLAIN
    | {
        "engine": "ray",
        "replicas": 3,
        "redis": {"mode": "bundled"},
        "model": {"initContainer": {"image": "fetcher", "resources": {"limits": {"memory": "1Gi"}}}},
        "settings": {"max_upload_size": 4_000_000_000, "speculate": "off", "tenant_weight": ["a=2"]},
        "resources": {"limits": {"cpu": "2500m", "memory": "8Gi"}},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    },
    "alone": PLAIN | {"replicas": 1, "redis": {"mode": "none"}, "networkPolicy": {"enabled": False}},
}
NAMES = [*EXAMPLES, *MORE]


@dataclass(frozen=True)
class Rendered:
    """One rendering: its documents, and the text that Helm prints at the end."""

    documents: tuple[dict[str, Any], ...]
    notes: str

    def of(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """The only document of a kind whose name is the release's and `suffix`."""
        name = f"lora-serve{suffix}"
        found = [item for item in self.documents if (item["kind"], item["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{len(found)} documents {kind} {name}"
        return found[0]

    def kinds(self) -> set[str]:
        return {item["kind"] for item in self.documents}

    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.of("StatefulSet")["spec"]["template"]["spec"]
        return spec

    def server(self) -> dict[str, Any]:
        """The server's container."""
        (container,) = self.pod()["containers"]
        return dict(container)

    def environment(self) -> dict[str, Any]:
        """Variable -> its text, or where that comes from."""
        return {item["name"]: item.get("value", item.get("valueFrom")) for item in self.server()["env"]}

    def templates(self) -> Iterator[dict[str, Any]]:
        """Those of pods."""
        for item in self.documents:
            if item["kind"] == "StatefulSet":
                yield item["spec"]["template"]
            elif item["kind"] == "RayService":
                cluster = item["spec"]["rayClusterConfig"]
                yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))

    def pods(self) -> Iterator[dict[str, Any]]:
        return (template["spec"] for template in self.templates())


def rendered(asked: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, str] | str], dict[str, Any]]:
    """What Helm makes of each of these values, and what it says of the chart's form."""
    command = [sys.executable, str(Path(__file__).with_name("helm_rendering.py"))]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    said = json.loads(done.stdout)
    return said["answers"], said["lint"]


def parsed(files: Mapping[str, str]) -> Rendered:
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    manifests = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [document for text in manifests for document in yaml.load_all(text, _Loader) if document]
    return Rendered(tuple(documents), notes)


class _Loader(yaml.CSafeLoader):
    """Refuses a key that a mapping has twice, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice: {keys}{node.start_mark}"
        return super().construct_mapping(node, deep)
