"""The base model: its name, place and form."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from lora_serve.core.setting_types import HumanInt, Names, ReasoningFormatName, ToolCallFormatName, setting

_MAX_NAME = 512  # characters: of a name on the wire
_SEPARATORS = ":,"  # they stand between names: base:adapter, and in lists of adapters


def _read_dtype(value: object) -> object:
    return {"half": "float16", "float": "float32"}.get(str(value), value)  # vLLM's other names


def _check_served_model_name(value: tuple[str, ...]) -> tuple[str, ...]:
    if any(len(name) > _MAX_NAME or any(c.isspace() or c in _SEPARATORS for c in name) for name in value):
        raise ValueError(
            f"expected a name of at most {_MAX_NAME} characters without spaces, `:` and `,`; several in a JSON list"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place of the base model."""

    model: str = setting(MISSING, "folder or hub id of the base model, or a GGUF file")


@dataclass(frozen=True, kw_only=True)
class AddressSettings(ModelSource):
    """The base model's name on the wire, and the address."""

    served_model_name: Annotated[Names, AfterValidator(_check_served_model_name)] = setting(
        (),
        "name of the base model on the wire, and others that mean it too; default: the name of the model's "
        "folder, or its hub id",
    )
    host: str = setting("127.0.0.1", "address to listen on", max_length=253, pattern=r"^[\w.:%\[\]-]+$")
    port: int = setting(8000, "TCP port; 0 takes a free one", ge=0, le=65535)

    @cached_property
    def base_name(self) -> str:
        """The base model's name on the wire."""
        return self.served_model_name[0] if self.served_model_name else name_of_model(self.model)

    @cached_property
    def other_names(self) -> frozenset[str]:
        """Names that mean the base model too: those given, else the folder's path, which clients of vLLM send."""
        if self.served_model_name:
            return frozenset(self.served_model_name[1:]) - {self.base_name}
        if not is_there(Path(self.model).exists):
            return frozenset()
        paths = {path.rstrip("/") for path in (self.model, os.path.abspath(self.model))}
        return frozenset({*paths, *(f"{path}/" for path in paths)} - {self.base_name})

    def check_name_on_the_wire(self) -> None:
        """Raises ValueError."""
        name = name_of_model(self.model)
        if not self.served_model_name and any(c.isspace() or c in _SEPARATORS for c in name):
            raise ValueError(
                f"--model: {name[:200]!r} would be the name on the wire, where spaces, `:` and `,` separate names: "
                "give --served-model-name"
            )


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """The base model's device and form."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto: cuda if present")
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_read_dtype)] = setting(
        "auto",
        "weights and activations; auto: the checkpoint's own where the device multiplies it faster than "
        "float32, else float32",
    )
    task: Literal["auto", "generate", "embed", "classify", "pooling"] = setting(
        "auto",
        "what the model does; auto: as its config.json and sentence-transformers files say; pooling: "
        "classify with a classifier's head, else embed",
    )
    pooling: Literal["auto", "cls", "mean", "last"] = setting(
        "auto", "which tokens make an embedding; auto: as the model's files say"
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = setting(
        "none",
        "round the base's linear weights at its first start, and keep the result on disk for the next; none: serve the "
        "checkpoint as it is",
    )
    max_model_len: HumanInt | None = setting(
        None, "tokens, prompt and answer together; default: the model's own limit", ge=8, le=2**30
    )


@dataclass(frozen=True, kw_only=True)
class ChatFormats:
    """The forms in which the model writes, and is written to."""

    tool_call_parser: ToolCallFormatName = setting(
        "auto", "how the model writes calls of tools; auto: as its chat template shows; none: calls are text"
    )
    reasoning_parser: ReasoningFormatName = setting(
        "auto", "how the model writes its reasoning; auto: as its chat template shows; none: it is text"
    )
    chat_template: str | None = setting(
        None, "file of the chat template, in place of the model's own; or the template itself"
    )


class ServedModelSettings(ChatFormats, ModelForm, AddressSettings):
    """The base model, its name on the wire, and the address."""


def name_of_model(model: str) -> str:
    """A folder's own name, that of a GGUF file without its ending; a hub id as it is."""
    try:
        path = Path(model)
        if path.suffix == ".gguf" and path.is_file():
            return path.stem
        return (path.resolve().name if path.name in ("", "..") else path.absolute().name) if path.is_dir() else model
    except (OSError, ValueError):
        return model


def is_there(asked: Callable[[], bool]) -> bool:
    """True if `asked` says so; a name that no file can have is one that is not there, too."""
    try:
        return asked()
    except (OSError, ValueError):
        return False
