"""Types that the schemas are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from lora_serve.core.setting_groups.http import RequestLimits
from lora_serve.core.setting_texts import parse_bytes

MAX_NAME_LENGTH = 512
DEFAULT_LIMITS = RequestLimits()
MAX_BIAS = 100.0
MAX_BYTES_LENGTH = 32  # characters
MAX_ID_LENGTH = 10  # digits
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 32  # each takes two calls of the tokenizer, on the event loop
MAX_BAD_WORD_LENGTH = 64  # characters
MAX_SALT_LENGTH = 1024  # characters, as in vLLM
MAX_TEMPLATE_VALUES = 10_000  # in `chat_template_kwargs`, at all depths
MAX_TEMPLATE_NESTING = 32


class Fields(BaseModel):
    """The base of all schemas. Types are strict: "5" is no number and 1 is no truth value."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


def without_null(value: Any) -> Any:
    """An object without its null fields."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def as_user(value: Any) -> str | None:
    """The end user that the caller names; None for a value that is no name."""
    return str(value) if isinstance(value, str | int) else None


def limits_of(info: ValidationInfo) -> RequestLimits:
    """The server's limits, which `check_fields` passes to the schemas; else the defaults."""
    return info.context if isinstance(info.context, RequestLimits) else DEFAULT_LIMITS


def as_stops(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """One stop string or a list of them -> tuple. Raises ValueError."""
    limits = limits_of(info)
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > limits.max_stop:
        raise ValueError(f"at most {limits.max_stop} stop strings are allowed (--max-stop)")
    if any(len(stop) > limits.max_stop_length for stop in stops):
        raise ValueError(f"a stop string may have {limits.max_stop_length} characters at most (--max-stop-length)")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return tuple(dict.fromkeys(stops))


def as_biases(value: Any, info: ValidationInfo) -> tuple[tuple[int | str, float], ...]:
    """{"token id": bias} -> pairs; biases are cut to -100 .. 100 as vLLM does. A key that is no number is a token's
    text, as llama.cpp has it. Raises ValueError.
    """
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids, or tokens' texts, and numbers")
    if len(value) > (most := limits_of(info).max_logit_bias):
        raise ValueError(f"at most {most} entries are allowed (--max-logit-bias)")
    return tuple(_as_bias(key, bias) for key, bias in value.items())


def check_allowed_ids(value: list[int]) -> list[int]:
    """Raises ValueError."""
    if not 1 <= len(value) <= MAX_ALLOWED_IDS:
        raise ValueError(f"from 1 to {MAX_ALLOWED_IDS} ids are allowed; for larger sets use `structured_outputs`")
    return value


def check_bad_words(value: list[str]) -> list[str]:
    """Raises ValueError."""
    if len(value) > MAX_BAD_WORDS:
        raise ValueError(f"at most {MAX_BAD_WORDS} words are allowed")
    if not all(len(word.strip()) > 0 and len(word) <= MAX_BAD_WORD_LENGTH for word in value):
        raise ValueError(f"a word must have from 1 to {MAX_BAD_WORD_LENGTH} characters, not only spaces")
    return value


def limited_by(setting: str, what: str, size: Callable[[Any], int] = int) -> AfterValidator:
    """The check of a field's size against a limit of the server; -1: there is none."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if size(value) > (most := getattr(limits_of(info), setting)) >= 0:
            raise ValueError(f"at most {most} {what} are allowed (--{setting.replace('_', '-')})")
        return value

    return AfterValidator(check)


def as_bytes(value: Any) -> Any:
    """1073741824, "512MiB" or "2GB", as in flags -> bytes. Raises ValueError."""
    if isinstance(value, str) and len(value) > MAX_BYTES_LENGTH:
        raise ValueError("expected a number of bytes such as 1073741824, 512MiB or 2GB")
    return parse_bytes(value)


def as_template_values(value: Any) -> dict[str, Any]:
    """{"name": any value}. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if len(value) > MAX_TEMPLATE_VALUES or not _is_small(value):
        raise ValueError(
            f"at most {MAX_TEMPLATE_VALUES} values are allowed, nested at most {MAX_TEMPLATE_NESTING} deep"
        )
    return value


def _is_small(value: Any) -> bool:
    """False if there are too many values, or they are nested too deeply: looked at no further than that."""
    level, num_values = [value], 0
    for _ in range(MAX_TEMPLATE_NESTING):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict | list):
                num_values += len(item)
                if num_values > MAX_TEMPLATE_VALUES:
                    return False
                inner += item.values() if isinstance(item, dict) else item
        level = inner
    return not any(isinstance(item, dict | list) for item in level)


def _as_bias(key: str, bias: Any) -> tuple[int | str, float]:
    is_id = key.isascii() and key.isdigit()
    if not 0 < len(key) <= (MAX_ID_LENGTH if is_id else MAX_BAD_WORD_LENGTH):
        raise ValueError(f"{key[:32]!r} is not a token id, nor a token's text")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias:  # noqa: PLR0124 (NaN; an int may be too large for math.isnan)
        raise ValueError(f"the bias of token {key[:32]} must be a number")
    return int(key) if is_id else key, float(max(-MAX_BIAS, min(MAX_BIAS, bias)))


_OBJECT, _TEXT, _NULL = {"type": "object"}, {"type": "string"}, {"type": "null"}
_OBJECTS = {"type": "array", "items": _OBJECT}
# Checked by hand, for better words; their types are what /openapi.json says.
Objects = Annotated[Any, WithJsonSchema(_OBJECTS)]
ObjectsOrNull = Annotated[Any, WithJsonSchema({"anyOf": [_OBJECTS, _NULL]})]
ObjectOrNull = Annotated[Any, WithJsonSchema({"anyOf": [_OBJECT, _NULL]})]
TextOrObject = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _OBJECT, _NULL]})]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME_LENGTH)]
User = Annotated[str | None, BeforeValidator(as_user)]
Stops = Annotated[tuple[str, ...], BeforeValidator(as_stops, json_schema_input_type=str | list[str])]
Biases = Annotated[
    tuple[tuple[int | str, float], ...], BeforeValidator(as_biases, json_schema_input_type=dict[str, float])
]
TemplateValues = Annotated[dict[str, Any], BeforeValidator(as_template_values)]
Documents = Annotated[list[dict[str, Any]], BeforeValidator(lambda value: as_template_values({"": value})[""])]
Bytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=1, le=2**50)]
TokenId = Annotated[int, Field(ge=0)]
StopIds = Annotated[list[TokenId], FailFast(), limited_by("max_stop_token_ids", "ids", len)]
AllowedIds = Annotated[list[TokenId], FailFast(), AfterValidator(check_allowed_ids)]
BadWords = Annotated[list[str], FailFast(), AfterValidator(check_bad_words)]
NumChoices = Annotated[int, Field(ge=1), limited_by("max_n", "answers to one prompt")]
NumLogprobs = Annotated[
    int, Field(ge=-1), limited_by("max_logprobs", "alternatives per token")
]  # -1: the whole vocabulary


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, so that a request with it is refused: all values but `harmless` are.

    `why` is said to the caller: it begins with a verb or a noun and says what to do instead.
    """

    why: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"refused: {self.why}"}

    def check(self, value: Any) -> Any:
        """Raises ValueError."""
        if any(value == item and type(value) is type(item) for item in self.harmless):
            return value
        raise ValueError(self.why)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that does not change what the caller gets; `why` says why not."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"ignored: {self.why}"}


def standing(field: Any) -> Refused | Ignored | None:
    """The mark of a model's field; None: it works."""
    found = [mark for mark in field.metadata if isinstance(mark, Refused | Ignored)]
    return found[0] if found else None


def marked(fields: Mapping[str, Any]) -> dict[str, Refused | Ignored]:
    """The fields of a model that bear a mark, by name."""
    return {name: mark for name, field in fields.items() if (mark := standing(field)) is not None}


# Fields that may hold as many integers as a body can.
TOKEN_ID_NAMES = frozenset(("prompt", "input", "tokens", "token_ids"))


@functools.cache
def known_names() -> frozenset[str]:
    """The names of all fields that some route reads; others are ignored. Call it once every schema is imported."""
    return frozenset[str]().union(*map(_read_names, _below(Fields)))


def _read_names(schema: type[Fields]) -> list[str]:
    return [name for name, field in schema.model_fields.items() if not isinstance(standing(field), Ignored)]


def _below(schema: type[Fields]) -> list[type[Fields]]:
    return [schema, *(found for child in schema.__subclasses__() for found in _below(child))]
