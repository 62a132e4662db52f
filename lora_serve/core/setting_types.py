"""The types of single settings (bytes, lists, NAME=NUMBER, a folder's files), and the field that one is in a group."""

from __future__ import annotations

import re
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field

from lora_serve.core.flags import ON_CUDA, flag_name
from lora_serve.core.setting_texts import MAX_BYTES, check_text, parse_bytes
from lora_serve.core.strict_json import JsonError, parse_json

T = TypeVar("T")
YEAR = 31_536_000  # seconds: the most of any time, which timers and clocks can all count
_TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_FEW = 4096
_MODULE_FIELDS = {"name", "path", "base_model_name", "is_3d_lora_weight"}
MAX_COUNT = 2**31 - 1  # of what is counted only, and takes no memory by itself
MAX_REGISTRATIONS = 16  # at once
MAX_DRAFT = 16  # tokens of one row and step that may be guessed
_LIGHTEST, _HEAVIEST = 1e-6, 1e6
_PACKAGE = Path(__file__).parents[1]

# Names that vLLM or its users have for the same format.
TOOL_CALL_ALIASES = {
    "glm47": "glm45",
    "granite4": "hermes",
    "qwen": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
_THINKING = ("deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "qwen3")
REASONING_ALIASES = dict.fromkeys(_THINKING, "deepseek_r1")


def parse_list(value: Any) -> Any:
    """An environment variable's text -> list: JSON's `["a", "b"]` or `a,b`. Anything else is left alone."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return check_text(parse_json(value.encode()))
        except JsonError:
            raise ValueError("expected a JSON list of texts, or texts with commas between them") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def parse_count(value: Any) -> Any:
    """`4k` -> 4000, `4K` -> 4096, as vLLM reads them; a plain number, and anything else, is left alone."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)([kmgKMG])\s*", value) if isinstance(value, str) else None
    return int(float(match[1]) * _TIMES[match[2]]) if match else value


def parse_gibibytes(value: Any) -> Any:
    """Bytes; a plain number that is too small for them counts GiB, as vLLM's --swap-space does."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,4}(?:\.\d{1,6})?\s*", value):
        return int(float(value) * 2**30)
    return value * 2**30 if isinstance(value, int) and 0 < value < _FEW else value


def parse_modules(value: Any) -> Any:
    """`name=path` texts, where each may be vLLM's JSON: {"name", "path", "base_model_name"}, or a list of them."""
    items = [value] if isinstance(value, str) and value.lstrip().startswith("{") else parse_list(value)
    return [text for item in items for text in _modules_in(item)] if isinstance(items, list | tuple) else items


def _modules_in(item: Any) -> list[Any]:
    if isinstance(item, str) and item.lstrip().startswith(("{", "[")):
        try:
            item = parse_json(item.encode())
        except JsonError as error:
            raise ValueError(f"expected NAME=PATH or a JSON object ({error.reason})") from None
    if isinstance(item, list):
        return [text for one in item for text in _modules_in(one)]
    if not isinstance(item, dict):
        return [item]
    if not item.keys() <= _MODULE_FIELDS or not all(isinstance(item.get(name), str) for name in ("name", "path")):
        raise ValueError('expected {"name": ..., "path": ...}, and `base_model_name` perhaps')
    return [f"{item['name']}={item['path']}"]


def parse_names(value: Any) -> Any:
    """A name, names, or a JSON list of them; commas part no names here, as a name must not hold one."""
    return (value,) if isinstance(value, str) and not value.lstrip().startswith("[") else parse_list(value)


def parse_origins(value: Any) -> Any:
    """Texts, where each may be a JSON list of them, as vLLM takes origins."""
    items = parse_list(value)
    if not isinstance(items, list | tuple):
        return items
    return [text for item in items for text in (parse_list(item) if str(item).startswith("[") else [item])]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=MAX_BYTES)]
Gibibytes = Annotated[int, BeforeValidator(parse_bytes), BeforeValidator(parse_gibibytes), Field(ge=0, le=MAX_BYTES)]
HumanInt = Annotated[int, BeforeValidator(parse_count)]
Modules = Annotated[tuple[str, ...], BeforeValidator(parse_modules)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
Origins = Annotated[tuple[str, ...], BeforeValidator(parse_origins)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(parse_list)]
Texts = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


def parse_weights(value: Any) -> Any:
    """["a=2", "b=0.5"] or one text of them -> (("a", 2.0), ("b", 0.5)). Anything else raises ValueError."""
    items = parse_list(value)
    if not isinstance(items, list | tuple):
        raise ValueError("expected a list of TENANT=NUMBER")
    return tuple(_parse_weight(item) for item in items)


def _parse_weight(item: Any) -> tuple[str, float]:
    name, equals, number = item.partition("=") if isinstance(item, str) else ("", "", "")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not (name and equals and _LIGHTEST <= weight <= _HEAVIEST):
        raise ValueError(f"expected TENANT=NUMBER with a number from {_LIGHTEST:g} to {_HEAVIEST:g}, not {item!r:.200}")
    return name, weight


TenantWeights = Annotated[tuple[tuple[str, float], ...], BeforeValidator(parse_weights)]


def parse_draft(value: Any) -> Any:
    """ "auto" or "off", or a number of tokens as a text or an integer. Anything else raises ValueError."""
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if text in ("auto", "off"):
        return text
    if re.fullmatch(r"[1-9]\d?", text) and int(text) <= MAX_DRAFT:
        return text
    raise ValueError(f"expected auto, off or a number of tokens from 1 to {MAX_DRAFT}")


Draft = Annotated[str, BeforeValidator(parse_draft)]


def parse_replicas(value: Any) -> Any:
    """ "auto", a range as "2..8", or a number as a text or an integer. Anything else raises ValueError."""
    if value == "auto":
        return value
    numbers = str(value).split("..") if isinstance(value, str | int) else []
    if len(numbers) in (1, 2) and all(re.fullmatch(r"[1-9]\d{0,2}|1000", number) for number in numbers):
        least, most = int(numbers[0]), int(numbers[-1])
        if least <= most:
            return value if len(numbers) > 1 else least
    raise ValueError("expected a number of engines from 1 to 1000, a range as 2..8, or auto")


Replicas = Annotated[int | str, BeforeValidator(parse_replicas)]


def names_in(folder: str) -> tuple[str, ...]:
    """The files of a folder of this package, without the seam `base.py` that they share: a new file is a new value of
    its setting and is named nowhere else. Listed, not imported, as `--help` must not load torch.
    """
    files = (_PACKAGE / folder).glob("[!_]*.py")
    return tuple(sorted(file.stem for file in files if file.stem != "base"))


if TYPE_CHECKING:
    EngineHostName: TypeAlias = str
    PolicyName: TypeAlias = str
    RouterName: TypeAlias = str
    AttentionName: TypeAlias = str
    LoraKernelName: TypeAlias = str
    ToolCallFormatName: TypeAlias = str
    ReasoningFormatName: TypeAlias = str
else:
    EngineHostName = Literal[names_in("engine_host/hosts")]
    PolicyName = Literal[names_in("engine/policies")]
    RouterName = Literal[names_in("routing/routers")]
    AttentionName = Literal[("auto", *names_in("model/attention"))]
    LoraKernelName = Literal[("auto", *names_in("model/lora/kernels"))]
    ToolCallFormatName = Literal[("auto", "none", *names_in("text/tool_calls"), *TOOL_CALL_ALIASES)]
    ReasoningFormatName = Literal[("auto", "none", *names_in("text/reasoning"), *REASONING_ALIASES)]


def setting(
    default: Any,
    description: str,
    *,
    repr: bool = True,  # noqa: A002
    on_cuda: Any = None,
    **checks: Any,
) -> Any:
    """A field of a group of settings, named like its flag with underscores and described for --help.

    `checks`: pydantic's (ge, le, pattern, ...), made once, when `Settings` are; a group itself checks nothing.
    `default`: MISSING if it must be given. `on_cuda`: the default of a server whose model runs on a GPU, if another.
    """
    shown = {} if on_cuda is None else {"json_schema_extra": {ON_CUDA: on_cuda}}
    return field(default=default, repr=repr, metadata={"description": description, **shown, **checks})


def part_of(settings: object, kind: type[T]) -> T:
    """The settings of one group, or of several as in `core/config.py`."""
    return kind(**{field.name: getattr(settings, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def changed_flags(settings: object, kind: type[Any]) -> list[str]:
    """The flags of a group that were given another value than their default."""
    return [flag_name(field.name) for field in fields(kind) if getattr(settings, field.name) != field.default]
