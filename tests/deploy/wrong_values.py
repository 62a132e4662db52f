"""Values that the chart refuses, and words of the refusal."""

from __future__ import annotations

from typing import Any

KEYS = {"secret": {"name": "keys"}}
MODEL = {"model": {"persistentVolumeClaim": {"claimName": "models"}}}
PLAIN: dict[str, Any] = KEYS | MODEL

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no Secret": (MODEL, "secret.name: name the Secret that holds the server's keys"),
    "no model": (KEYS, "model: say where the base model comes from: one of persistentVolumeClaim.claimName"),
    "two models": (KEYS | {"model": {"hub": "org/name", "image": {"reference": "x"}}}, "give one of image, hub"),
    "replicas without a Redis": (PLAIN | {"redis": {"mode": "none"}}, "replicas share adapters, tenants and limits"),
    "growth without a Redis": (
        PLAIN | {"redis": {"mode": "none"}, "replicas": 1, "autoscaling": {"mode": "hpa"}},
        "replicas: 1 without autoscaling",
    ),
    "no key of the Redis' URL": (MODEL | {"secret": {"name": "keys", "redisUrl": ""}}, "holds the URL"),
    "bundled Redis without a password": (
        MODEL | {"secret": {"name": "keys", "redisPassword": ""}, "redis": {"mode": "bundled"}},
        "secret.redisPassword names the key",
    ),
    "fewer replicas at most than at least": (
        PLAIN | {"autoscaling": {"mode": "keda", "minReplicas": 5, "maxReplicas": 2}},
        "minReplicas 5 is above maxReplicas 2",
    ),
    "pool whose names all may read": (
        PLAIN | {"inferencePool": {"enabled": True}, "networkPolicy": {"enabled": False}},
        "names of adapters are open to all pods",
    ),
    "pool over TLS": (
        PLAIN | {"inferencePool": {"enabled": True}, "tls": {"secretName": "cert"}},
        "end TLS at the gateway",
    ),
    "route to nowhere": (PLAIN | {"httpRoute": {"enabled": True}}, "parentRefs must name a Gateway"),
    "unknown value": (PLAIN | {"replica": 3}, "additional properties 'replica' not allowed"),
    "unknown value inside": (PLAIN | {"redis": {"url": "redis://x"}}, "at '/redis': additional properties 'url'"),
    "unknown setting": (PLAIN | {"settings": {"max_lora": 3}}, "invalid propertyName 'max_lora'"),
    "setting that the chart owns": (PLAIN | {"settings": {"port": 80}}, "invalid propertyName 'port'"),
    "secret in plain sight": (PLAIN | {"settings": {"admin_key": "x"}}, "invalid propertyName 'admin_key'"),
    "setting that is a mapping": (PLAIN | {"settings": {"policy": {"a": 1}}}, "at '/settings/policy'"),
    "engine that there is not": (
        PLAIN | {"engine": "far"},
        "at '/engine': value must be one of 'thread', 'process', 'ray'",
    ),
    "two autoscalers": (PLAIN | {"autoscaling": {"mode": "hpa+keda"}}, "must be one of 'off', 'hpa', 'keda', 'ray'"),
    "fleet without a Redis": (PLAIN | {"engine": "ray", "redis": {"mode": "none"}}, "engines share adapters"),
    "fleet that grows by another's autoscaler": (
        PLAIN | {"engine": "ray", "autoscaling": {"mode": "keda"}},
        "take autoscaling.mode: ray",
    ),
    "growth by Ray without a fleet": (PLAIN | {"autoscaling": {"mode": "ray"}}, "is for engine: ray; take hpa or keda"),
    "flags for a fleet": (PLAIN | {"engine": "ray", "extraArgs": ["--max-loras", "7"]}, "give settings in place of"),
    "pool of gateways": (PLAIN | {"engine": "ray", "inferencePool": {"enabled": True}}, "leave inferencePool off"),
    "replicas twice": (PLAIN | {"settings": {"replicas": 3}}, "invalid propertyName 'replicas'"),
    "no gateway": (PLAIN | {"engine": "ray", "fleet": {"gateways": 0}}, "at '/fleet/gateways': minimum: got 0, want 1"),
    "no replicas": (PLAIN | {"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
    "text for a number": (PLAIN | {"replicas": "two"}, "at '/replicas': got string, want integer"),
    "size without a unit of Kubernetes": (PLAIN | {"store": {"size": "20GiB"}}, "at '/store/size'"),
    "no limit of memory": (PLAIN | {"resources": {"limits": {"memory": None}}}, "missing property 'memory'"),
    "port beyond all": (PLAIN | {"service": {"port": 70000}}, "maximum: got 70,000, want 65,535"),
    "init container without an image": (
        KEYS | {"model": {"initContainer": {"args": ["x"]}}},
        "missing property 'image'",
    ),
    "no drain": (PLAIN | {"drain": {"requestSeconds": 0}}, "at '/drain/requestSeconds'"),
    "digest that is none": (PLAIN | {"image": {"digest": "latest"}}, "at '/image/digest'"),
    "interval that is none": (PLAIN | {"serviceMonitor": {"interval": "often"}}, "at '/serviceMonitor/interval'"),
    "choice of a setting that there is not": (PLAIN | {"settings": {"router": "afinity"}}, "at '/settings/router'"),
    "text for a number of a setting": (PLAIN | {"settings": {"max_loras": "many"}}, "at '/settings/max_loras'"),
    "setting above its bound": (PLAIN | {"settings": {"max_loras": 20_000}}, "maximum: got 20,000, want 16,384"),
    "memory that is none": (
        PLAIN | {"resources": {"limits": {"cpu": 4, "memory": "64G B"}}},
        "at '/resources/limits/memory'",
    ),
    "GPU in words": (
        PLAIN | {"resources": {"limits": {"nvidia.com/gpu": "one"}}},
        "at '/resources/limits/nvidia.com~1gpu'",
    ),
    "fleet above its most": (
        PLAIN | {"engine": "ray", "replicas": 9, "autoscaling": {"mode": "ray", "maxReplicas": 2}},
        "replicas 9 is above maxReplicas 2",
    ),
    "engine of half a core": (
        PLAIN | {"engine": "ray", "resources": {"limits": {"cpu": "500m"}}},
        "resources.limits.cpu is 500m, give 1 or more",
    ),
    "engine of a third of a core": (
        PLAIN | {"engine": "ray", "resources": {"limits": {"cpu": 0.3}}},
        "resources.limits.cpu is 0.3, give 1 or more",
    ),
}
