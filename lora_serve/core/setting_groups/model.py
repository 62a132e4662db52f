"""The base model: its name, place and form."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lora_serve.core.extensions import ReasoningFormatName, ToolCallFormatName
from lora_serve.core.setting_types import Count, Names, SettingsGroup

_MAX_NAME = 512  # characters: of a name on the wire
_SEPARATORS = ":,"  # they stand between names: base:adapter, and in lists of adapters


class ServedModelSettings(SettingsGroup):
    """The base model, its name on the wire, and the address."""

    model: str = Field(description="folder or hub id of the base model")
    served_model_name: Names = Field(
        (),
        description="name of the base model on the wire, and others that mean it too; default: the name of the "
        "model's folder, or its hub id",
    )
    host: str = Field("127.0.0.1", max_length=253, pattern=r"^[\w.:%\[\]-]+$", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs; auto: cuda if present")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="weights and activations; auto: the checkpoint's own where the device multiplies it faster than "
        "float32, else float32",
    )
    task: Literal["auto", "generate", "embed", "classify", "pooling"] = Field(
        "auto",
        description="what the model does; auto: as its config.json and sentence-transformers files say; pooling: "
        "classify with a classifier's head, else embed",
    )
    pooling: Literal["auto", "cls", "mean", "last"] = Field(
        "auto", description="which tokens make an embedding; auto: as the model's files say"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="quantise the base's linear weights at load; none: serve the checkpoint as it is"
    )
    max_model_len: Count | None = Field(
        None, ge=8, le=2**30, description="tokens, prompt and answer together; default: the model's own limit"
    )

    tool_call_parser: ToolCallFormatName = Field(
        "auto",
        description="how the model writes calls of tools; auto: as its chat template shows; none: calls are text",
    )

    reasoning_parser: ReasoningFormatName = Field(
        "auto", description="how the model writes its reasoning; auto: as its chat template shows; none: it is text"
    )

    chat_template: str | None = Field(
        None, description="file of the chat template, in place of the model's own; or the template itself"
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: object) -> object:
        return {"half": "float16", "float": "float32"}.get(str(value), value)  # vLLM's other names

    @field_validator("served_model_name")
    @classmethod
    def _check_served_model_name(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(len(name) > _MAX_NAME or any(c.isspace() or c in _SEPARATORS for c in name) for name in value):
            raise ValueError(
                f"expected a name of at most {_MAX_NAME} characters without spaces, `:` and `,`; several in a JSON list"
            )
        return value

    @model_validator(mode="after")
    def _check_name_on_the_wire(self) -> Self:
        name = name_of_model(self.model)
        if not self.served_model_name and any(c.isspace() or c in _SEPARATORS for c in name):
            raise ValueError(
                f"--model: {name[:200]!r} would be the name on the wire, where spaces, `:` and `,` separate names: "
                "give --served-model-name"
            )
        return self


def name_of_model(model: str) -> str:
    """A folder's own name; a hub id as it is."""
    try:
        path = Path(model)
        return (path.resolve().name if path.name in ("", "..") else path.absolute().name) if path.is_dir() else model
    except (OSError, ValueError):
        return model
