"""What the numbers of a classifier mean: its labels' names, and their probabilities."""

from __future__ import annotations

import numpy as np

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.pooling.asking import Vector
from lora_serve.server.services import Services


def labels_of(services: Services, adapters: AdapterSet) -> tuple[str, ...]:
    """The names of the labels that these adapters, or the base without any, choose from.

    An adapter with a head of its own has those of its registration: `"metadata": {"labels": [...]}`, one for each.
    Raises InvalidRequestError if there is no head at all.
    """
    own = next((member.ref for member in adapters.members if member.ref.traits.num_labels), None)
    if own is not None:
        entry = services.catalog.snapshot.entries.get(own.name)
        return _named(None if entry is None else entry.metadata.get("labels"), own.traits.num_labels)
    labels = services.spec.pooling.labels if services.spec.pooling is not None else ()
    if not labels:
        who = adapters.model_name(services.base_name)
        raise InvalidRequestError(
            f"`{who}` has no classification head: the base model has none of its own, so name an adapter that brings "
            "one (PEFT's task type SEQ_CLS).",
            param="model",
        )
    return labels


def probabilities(logits: Vector, *, is_multi_label: bool) -> list[float]:
    """Softmax over the labels; sigmoid of each where they do not exclude one another, or if there is only one.

    As transformers' TextClassificationPipeline does.
    """
    values = logits.astype(np.float64)
    if is_multi_label or len(values) == 1:
        found = np.exp(-np.logaddexp(0.0, -values))
    else:
        powers = np.exp(values - values.max())
        found = powers / powers.sum()
    return [float(value) for value in found]


def _named(names: object, count: int) -> tuple[str, ...]:
    """As transformers names labels that have no names."""
    if isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names):
        return tuple(names)
    return tuple(f"LABEL_{index}" for index in range(count))
