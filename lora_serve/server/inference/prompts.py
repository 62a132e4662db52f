"""`prompt` and `messages` -> token ids. Long texts are tokenised on a thread, not on the event loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.server.background.tasks import LONG
from lora_serve.server.inference.requests import TokenLimits, check_vocabulary, max_tokens_for
from lora_serve.server.schemas.constraints import NO_TOOLS, ToolUse
from lora_serve.server.schemas.inference import ChatFields, CompletionFields, SamplingFields
from lora_serve.server.schemas.pooling import InputFields
from lora_serve.text.chat import ChatMessage, parse_messages, render_chat
from lora_serve.text.control_tokens import RenderedChat
from lora_serve.text.grammars.checking import measured
from lora_serve.text.tokenizer import TextModel

MAX_PROMPTS = 64
MAX_LISTS = 4096  # looked at, more than any route takes
LONG_TEXT = 50_000  # characters; a shorter one is tokenised before it is refused
MANY_IDS = 500_000  # of a prompt; more are refused before they become Python objects
MESSAGE_LENGTH = 20  # characters; what a message, or a part of one, costs beside its text

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in the two forms that are needed: ids for the engine, text for `echo`."""

    token_ids: tuple[int, ...]
    text: str


async def thread_if_long(length: int, work: Callable[[], T]) -> T:
    """The result of `work`, which runs on a thread if `length`, in the units of LONG, is above LONG. It should be work
    in Python itself, which lets the event loop in between.
    """
    return await asyncio.to_thread(work) if length > LONG else work()


async def completion_prompts(
    text: TextModel, spec: ModelSpec, fields: CompletionFields, max_prompts: int = MAX_PROMPTS
) -> list[EncodedPrompt]:
    """Encode each prompt of the request. Raises InvalidRequestError."""
    prompts = await read_prompts(fields.prompt, max_prompts=max_prompts)
    limit = _limit_of(fields, spec)
    for prompt in prompts:
        if isinstance(prompt, str) and limit is None:
            check_can_fit(text, spec, prompt, "prompt")
    encoded = await thread_if_long(
        sum(map(len, prompts)), lambda: [_completion_prompt(text, spec, fields, prompt, limit) for prompt in prompts]
    )
    if not all(prompt.token_ids for prompt in encoded):
        raise InvalidRequestError("A prompt must hold at least one token.", param="prompt")
    return encoded


def prompt_limit(asked: int | None, spec: ModelSpec, for_answer: int = 0) -> int | None:
    """The number of tokens to which prompts are cut, as asked (-1: to the model's limit, but for `for_answer`); None:
    they are not. Raises InvalidRequestError.
    """
    if asked is None:
        return None
    if asked == 0 or asked > spec.max_model_len:
        raise InvalidRequestError(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {spec.max_model_len}, this model's limit.",
            param="truncate_prompt_tokens",
        )
    return max(1, spec.max_model_len - for_answer) if asked == -1 else asked


def _limit_of(fields: SamplingFields, spec: ModelSpec) -> int | None:
    return prompt_limit(fields.truncate_prompt_tokens, spec, fields.answer_tokens or 1)


def _cut(token_ids: Sequence[int], fields: SamplingFields, limit: int) -> tuple[int, ...]:
    return tuple(token_ids[-limit:] if fields.truncation_side == "left" else token_ids[:limit])


def _completion_prompt(
    text: TextModel, spec: ModelSpec, fields: CompletionFields, prompt: Prompt, limit: int | None
) -> EncodedPrompt:
    if isinstance(prompt, str):
        token_ids = text.encode(prompt, fields.add_special_tokens)
        if limit is None or len(token_ids) <= limit:
            return EncodedPrompt(token_ids, prompt)
        prompt = token_ids
    if limit is not None:
        prompt = _cut(prompt, fields, limit)
    if len(prompt) > MANY_IDS:
        max_tokens_for(len(prompt), TokenLimits(fields.max_tokens), spec.max_model_len)
    check_vocabulary(prompt, spec, "prompt")
    token_ids = tuple(prompt)
    return EncodedPrompt(token_ids, text.decode(token_ids) if fields.echo else "")


async def chat_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Parse the `messages` of a request. Raises InvalidRequestError."""
    listed = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    contents = [item.get("content") for item in listed]
    num_parts = len(contents) + sum(len(content) for content in contents if isinstance(content, list))
    has_calls = any(item.get("tool_calls") for item in listed)
    return await thread_if_long(LONG + 1 if has_calls else MESSAGE_LENGTH * num_parts, lambda: parse_messages(value))


async def chat_prompt(
    text: TextModel,
    spec: ModelSpec,
    fields: ChatFields | InputFields,
    messages: tuple[ChatMessage, ...],
    tools: ToolUse = NO_TOOLS,
    hint: str = "",
) -> tuple[int, ...]:
    """Render the messages and encode them. `hint`: see `render_chat`. Inputs to be pooled are cut later.

    Raises InvalidRequestError.
    """
    is_cut, special = bool(fields.truncate_prompt_tokens), bool(fields.add_special_tokens)
    has_calls = bool(tools.tools) or any(message.tool_calls or message.role == "tool" for message in messages)

    def render() -> RenderedChat:
        return render_chat(
            text,
            messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            template_values=fields.template_values,
            documents=fields.documents if isinstance(fields, ChatFields) else (),
            tools=_tools_for(text, spec, tools),
            check=lambda rendered: None if is_cut else check_can_fit(text, spec, rendered, "messages"),
            hint=hint,
        )

    length = LONG + 1 if has_calls else sum(MESSAGE_LENGTH + len(message.content) for message in messages)
    thread = text.template.thread
    rendered = await (thread_if_long(length, render) if thread is None else thread(render))
    token_ids = await thread_if_long(len(rendered.text), lambda: text.encode_chat(rendered, special))
    if not token_ids:
        raise InvalidRequestError("The messages give an empty prompt.", param="messages")
    if isinstance(fields, InputFields) or (limit := _limit_of(fields, spec)) is None:
        return token_ids
    return _cut(token_ids, fields, limit)


def _tools_for(text: TextModel, spec: ModelSpec, tools: ToolUse) -> list[dict[str, Any]]:
    """The tools in the prompt; also those that may not be called, as vLLM has it, if the template knows tools.

    Raises InvalidRequestError for more text than the context holds, before a template writes all of it.
    """
    if tools is NO_TOOLS:
        return []
    if tools.mode != "none":
        _ = text.template.call_format  # found here, on a thread, as are the places for tools
    has_place = text.template.tool_forms.has_tools
    is_left_out = not tools.tools or (tools.mode == "none" and not has_place)
    offered = [] if is_left_out else tools.for_template()
    most = max(LONG_TEXT, spec.max_model_len * text.max_token_length)
    if measured(offered, most) > most:
        message = f"`tools` hold more text than this model's context of {spec.max_model_len} tokens. Shorten them."
        raise InvalidRequestError(message, param="tools", code="context_length_exceeded")
    return offered


def check_can_fit(text: TextModel, spec: ModelSpec, prompt: str, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are, before it is tokenised. Raises InvalidRequestError."""
    at_least = len(prompt) // max(1, text.max_token_length)
    if len(prompt) > LONG_TEXT and at_least > spec.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {spec.max_model_len} tokens. However, your `{param}` has at "
            f"least {at_least} tokens. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


async def read_prompts(value: Any, param: str = "prompt", max_prompts: int = MAX_PROMPTS) -> tuple[Prompt, ...]:
    """Call `parse_prompts`, on a thread if there is much to look at."""
    return await thread_if_long(length_of(value), lambda: parse_prompts(value, param, max_prompts))


def length_of(value: Any) -> int:
    """The number of elements of a list and of the first lists in it."""
    if not isinstance(value, list):
        return 0  # an array is looked at as one
    return len(value) + sum(len(item) for item in value[:MAX_LISTS] if isinstance(item, list))


def parse_prompts(value: Any, param: str = "prompt", max_prompts: int = MAX_PROMPTS) -> tuple[Prompt, ...]:
    """str, list[str], list[int] or list[list[int]] -> prompts. Raises InvalidRequestError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | array) or not value:
        raise _wrong_prompt(param)
    if _is_token_ids(value):
        return (value,)
    if len(value) > max_prompts:
        message = f"At most {max_prompts} {param}s are allowed in one request (got {len(value)})."
        raise InvalidRequestError(message, param=param)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list | array) and _is_token_ids(item) for item in value):
        return tuple(value)
    raise _wrong_prompt(param)


def _is_token_ids(value: list[Any] | array[int]) -> bool:
    return isinstance(value, array) or all(type(item) is int for item in value)


def _wrong_prompt(param: str) -> InvalidRequestError:
    message = f"`{param}` must be a string, a list of strings, a list of token ids, or a list of lists of token ids."
    return InvalidRequestError(message, param=param)
