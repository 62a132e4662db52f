"""The fields of a chat that another API has too, under the same name and with the same meaning."""

from __future__ import annotations

from lora_serve.server.schemas.generation import ChatFields
from lora_serve.server.schemas.markers import marked
from lora_serve.server.schemas.request import RequestFields


def fields_in_common(schema: type[RequestFields], translated: frozenset[str]) -> tuple[str, ...]:
    """Names that are passed on to a chat as they came: those that work in both, but for `translated`."""
    chat, own = ChatFields.model_fields, schema.model_fields
    unserved = marked(chat).keys() | marked(own).keys()
    return tuple(name for name in chat if name in own and name not in unserved | translated)
