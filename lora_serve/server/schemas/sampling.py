"""What completions and chat have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import Biases, Fields, Name, StopIds, Stops, User, without_null

MAX_N = 16
MAX_ADAPTERS = 8  # composed in one request
MAX_SCALE = 100.0
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
DAY_MS = 24 * 3600 * 1000


class AdapterScale(Fields):
    """One element of `adapters`: its deltas count `scale` times; a negative scale takes them away."""

    id: Name
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE)


AdapterScales = Annotated[
    list[Annotated[AdapterScale, BeforeValidator(without_null)]], Field(min_length=1, max_length=MAX_ADAPTERS)
]


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Fields):
    """vLLM's and OpenAI's sampling fields, and our own."""

    model: Name | None = None
    adapters: AdapterScales | None = None
    adapter_id: Name | None = None
    user: User = None  # the end user: with the tenant, who always gets the same side of a canary

    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_null)] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    logit_bias: Biases = ()
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = ()
    stop_token_ids: StopIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool = False
    echo: bool = False

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout_ms: int | None = Field(None, ge=1, le=DAY_MS)
    max_cold_wait_ms: int | None = Field(None, ge=0, le=DAY_MS)
    on_cold: Literal["wait", "base", "previous", "fail"] = "wait"

    @model_validator(mode="after")
    def _check_together(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is allowed only with stream: true.", param="stream_options")
        return self
