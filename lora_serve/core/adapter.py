"""Names, versions, kinds and states of adapters."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from lora_serve.core.errors import InvalidRequestError

# PUT /admin/adapters/{id}/route is about {id}: an upload to an id with such an end would be taken for it.
TAKEN_ENDS = ("route", "sharing")
ADAPTER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # checked wherever a record is read


class AdapterState(enum.StrEnum):
    """REGISTERED -> FETCHING -> ON_HOST <-> ON_DEVICE, and any -> FAILED."""

    REGISTERED = "registered"
    FETCHING = "fetching"
    ON_HOST = "on_host"
    ON_DEVICE = "on_device"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that an adapter's tokenizer has and the base's has not."""

    id: NonNegativeInt
    content: str
    is_special: bool = False  # it is left out of answers unless they show special tokens
    single_word: bool = False  # this and those below: how a tokenizer looks for it in a text
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class AdapterTraits:
    """The kind of an adapter version, as far as the doors must know it."""

    is_additive: bool = True  # it only adds low-rank deltas, so that versions can be scaled and composed
    invocation_tokens: tuple[
        NonNegativeInt, ...
    ] = ()  # activated LoRA: it acts from their last occurrence in the prompt on
    base: str = ""  # ModelSpec.fingerprint of the base it was checked against; empty: not noted
    vocab_size: NonNegativeInt = 0  # of its own embedding and output head; 0: the base's
    added_tokens: tuple[AddedToken, ...] = ()  # by their ids, which follow the base tokenizer's
    num_labels: NonNegativeInt = (
        0  # of a classification head of its own; 0: it has none, and the base's labels are its own
    )
    eos_token_ids: tuple[NonNegativeInt, ...] = ()  # end its answers beside the base's


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of one adapter, named by the digest of its content.

    Every cache key below the doors carries `digest`; names and version numbers are for people.
    """

    tenant: str
    name: str  # the public id, e.g. "acme/support"
    version: int  # 1, 2, 3, ... per name
    digest: str  # "sha256:" + 64 hex digits over config and weights
    rank: int  # the largest rank of any module
    num_bytes: int  # host bytes of its weights once loaded
    traits: AdapterTraits = AdapterTraits()

    @property
    def label(self) -> str:
        """`name@version`, for logs."""
        return f"{self.name}@{self.version}"

    def start_in(self, prompt_token_ids: Sequence[int]) -> int | None:
        """The first position at which the adapter acts in a sequence of this prompt; None: nowhere.

        Activated LoRA (Greenewald et al., 2025, arXiv 2504.12397) acts from the first of its invocation tokens on,
        and not at all in a prompt that does not hold them, as in PEFT (`calculate_alora_offsets`).
        """
        tokens = self.traits.invocation_tokens
        if not tokens:
            return 0
        starts = range(len(prompt_token_ids) - len(tokens), -1, -1)
        return next((i for i in starts if tuple(prompt_token_ids[i : i + len(tokens)]) == tokens), None)


def split_name(name: str) -> tuple[str, str | None]:
    """`id@selector` as (id, selector); the selector is None where there is no `@`."""
    adapter_id, at, selector = name.partition("@")
    return adapter_id, selector if at else None


def is_adapter_id(text: str) -> bool:
    """True for a legal id."""
    return bool(ADAPTER_ID.match(text)) and not (".." in text or "//" in text or text.endswith("/"))


def check_adapter_id(adapter_id: str) -> str:
    """Return `adapter_id` unchanged if it is a legal id, else raise InvalidRequestError.

    Legal: `[A-Za-z0-9][A-Za-z0-9._/-]{0,127}` without `..` (so no `:`, no `,`, no `@`, no path tricks).
    """
    if not is_adapter_id(adapter_id):
        raise InvalidRequestError(
            f"{adapter_id[:140]!r} is not a legal adapter id: it must match [A-Za-z0-9][A-Za-z0-9._/-]{{0,127}} "
            "and hold no '..', no '//' and no '/' at its end.",
            param="id",
        )
    return adapter_id


def check_new_adapter_id(adapter_id: str) -> str:
    """Return `adapter_id` unchanged if an adapter may be registered under it, else raise InvalidRequestError."""
    *_, last = check_adapter_id(adapter_id).split("/")
    if last != adapter_id and last in TAKEN_ENDS:
        raise InvalidRequestError(
            f"An adapter's id may not end in `/{last}`, as PUT /admin/adapters/ID/{last} means something else: "
            f"register it under another one, such as `{adapter_id}-1`.",
            param="id",
        )
    return adapter_id
