"""What a gateway says of its fleet: GET /admin/fleet."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.fleet.site import ADMIN


def fleet_status(url: str) -> Any:
    """The document; {} where there is none."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    try:
        connection.request("GET", "/admin/fleet", headers=ADMIN)
        answer = connection.getresponse()
        text = answer.read()
        return json.loads(text) if answer.status == 200 else {}
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()


def loads_of(url: str) -> dict[str, int]:
    """How many adapters all replicas have put into a slot ("device") and into host memory ("host") since their start.
    They tell their figures once a second.
    """
    time.sleep(1.5)
    tiers = [replica["tiers"] for replica in fleet_status(url)["data"]]
    return {tier: sum(one[tier]["loads"] for one in tiers) for tier in ("device", "host")}


def num_serving(url: str) -> int:
    """Replicas that this gateway sends requests to."""
    return sum(replica["state"] == "ready" for replica in fleet_status(url).get("data", []))
