"""What is served, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup


class ServedModelSettings(SettingsGroup):
    """What is served, and where."""

    model: str = Field(description="folder or hub id of the base model")
    served_model_name: str | None = Field(
        None, description="name of the base model on the wire; default: the model's folder or hub id"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs; auto: cuda if present")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="weights; auto: the checkpoint's own where the device computes it natively, else float32"
    )
    task: Literal["auto", "generate", "embed", "classify"] = Field(
        "auto", description="what the model does; auto: as its config.json and sentence-transformers files say"
    )
    pooling: Literal["auto", "cls", "mean", "last"] = Field(
        "auto", description="which tokens make an embedding; auto: as the model's files say"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="quantise the base's linear weights at load; none: serve the checkpoint as it is"
    )
    max_model_len: int | None = Field(
        None, ge=8, description="tokens, prompt and answer together; default: the model's own limit"
    )
