"""What the log may not show, as the settings say it: secrets, and where on this machine things lie."""

from __future__ import annotations

import os
from pathlib import Path

from lora_serve.core.settings import Settings
from lora_serve.logs.redaction import Redaction, passwords_in

_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def log_redaction(settings: Settings) -> Redaction:
    """Names in place of the folders that were given; nothing in place of keys and passwords."""
    secrets = [settings.admin_key or "", *passwords_in(settings.redis_url, settings.otlp_traces_endpoint)]
    secrets += [os.environ.get(name, "") for name in _SECRET_VARIABLES]
    places = {"store": settings.store, "cwd": Path.cwd()}
    if Path(settings.model).exists():
        places["model"] = Path(settings.model)
    if settings.ssl_certfile is not None:
        places["tls"] = settings.ssl_certfile.parent
    for number, root in enumerate(settings.adapter_root):
        places["adapter-root" if number == 0 else f"adapter-root-{number + 1}"] = root
    return Redaction(secrets, places)
