"""Names of tenants and adapters in /metrics: who reads them, and the figures without them for everybody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from lora_serve.core.errors import AuthenticationError, ForbiddenError
from lora_serve.server.guards.access import authenticated
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authentication.authenticator import Authenticator

OTHERS = "other"
# What is written in place of the names. Whatever has one of these labels is added up.
_INSTEAD = {"tenant": OTHERS, "adapter": OTHERS, "running_lora_adapters": "", "waiting_lora_adapters": ""}


def may_read_names(request: web.Request) -> bool:
    """By --metrics-names: everybody, or whoever sends the admin key. A wrong key is no error, as probes send none,
    but too many are: WrongKeysError.
    """
    services = request.app[SERVICES]
    wanted = services.config.metrics_names
    if wanted == "open" or (wanted == "auto" and not services.authenticator.required):
        return True
    try:
        return authenticated(request, Authenticator.admin).sees_all
    except (AuthenticationError, ForbiddenError):
        return False


def without_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """The same families and sums; the names are gone, and how many there are."""
    for family in families:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
        for sample in family.samples:
            nameless = sample._replace(labels=_nameless(sample.labels))
            key = (sample.name, tuple(sorted(nameless.labels.items())))
            known = sums.get(key)
            sums[key] = nameless if known is None else known._replace(value=known.value + sample.value)
        family.samples = list(sums.values())
        yield family


def _nameless(labels: Mapping[str, str]) -> dict[str, str]:
    return {label: _INSTEAD.get(label, value) for label, value in labels.items()}
