"""A chat's answer in the words of an API that shows a turn as items: texts, reasoning, calls of tools."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msgspec import UNSET, Struct

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import PromptEvent
from lora_serve.core.request import FinishReason
from lora_serve.server.answers import compact
from lora_serve.server.openai.answering import AnswerBody
from lora_serve.server.openai.chat import ChatBody
from lora_serve.server.schemas import generated as wire
from lora_serve.server.schemas.fields import marked
from lora_serve.server.schemas.inference import ChatFields, RequestFields
from lora_serve.text.output import Piece


class StreamEvent(Struct, kw_only=True):
    """One event of a stream; by its `type` it has more fields."""

    type: str


@dataclass(slots=True)
class TurnItem:
    """One part of a turn as it grows."""

    kind: Literal["text", "reasoning", "call"]
    number: int
    name: str = ""  # of the tool that is called
    call_id: str = ""
    parts: list[str] = field(default_factory=list)  # of the text, or of the call's arguments
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True, kw_only=True)
class TranslatedBody(AnswerBody):
    """Reads the chunks of a chat of one choice. The whole answer is what the stream adds up to."""

    chat: ChatBody
    items: list[TurnItem] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ending: ClassVar[bytes] = b""
    _held: str = ""  # white space that is shown only if a text follows, not a call
    _held_logprobs: list[wire.TokenLogprob] = field(default_factory=list)  # of tokens whose text has not come yet
    _is_open: bool = False  # the last item may grow

    @abstractmethod
    def begun(self) -> Iterator[StreamEvent]:
        """The events before the first item: the prompt is computed."""

    @abstractmethod
    def opened(self, item: TurnItem) -> Iterator[StreamEvent]:
        """The events of a new item."""

    @abstractmethod
    def grown(self, item: TurnItem, text: str, logprobs: list[wire.TokenLogprob]) -> Iterator[StreamEvent]:
        """The events of more text of an item."""

    @abstractmethod
    def closed(self, item: TurnItem) -> Iterator[StreamEvent]:
        """The events of an item that is whole."""

    @abstractmethod
    def ended(self) -> Iterator[StreamEvent]:
        """The events after the last item."""

    @abstractmethod
    def shown(self) -> Struct:
        """The whole answer, once all items are."""

    @property
    def num_values(self) -> int:
        """See `AnswerBody.num_values`."""
        return sum(20 * len(item.logprobs) + sum(map(len, item.parts)) // 8 for item in self.items)

    @property
    def is_cut(self) -> bool:
        """True if the answer has no end of its own."""
        return self.finish_reason == FinishReason.LENGTH

    def sse(self, chunk: StreamEvent) -> bytes:
        """A named event."""
        return b"event: %b\ndata: %b\n\n" % (chunk.type.encode(), compact(chunk))

    def add(self, number: int, event: PromptEvent | Piece) -> None:
        for _ in self.chunks(number, event):
            pass

    def forget(self, number: int) -> None:
        self.chat.forget(number)
        self.items, self.finish_reason, self.stop_reason = [], None, None
        self._held, self._held_logprobs, self._is_open = "", [], False

    def is_complete(self, number: int) -> bool:
        return self.chat.is_complete(number)

    def whole(self) -> Struct:
        for _ in self.last_chunks():
            pass
        return self.shown()

    def chunks(self, number: int, event: PromptEvent | Piece) -> Iterator[StreamEvent]:
        if isinstance(event, PromptEvent):
            yield from self.begun()
            return
        for chunk in self.chat.chunks(number, event):
            yield from self._read(*chunk.choices)

    def last_chunks(self) -> Iterator[StreamEvent]:
        if self._held and not any(item.kind == "call" for item in self.items):
            yield from self._grow("text", self._held, self._held_logprobs)
        yield from self._close()
        yield from self.ended()

    def _read(self, choice: wire.ChatPart) -> Iterator[StreamEvent]:
        delta = choice.delta
        if delta.reasoning_content:
            yield from self._grow("reasoning", delta.reasoning_content, [])
        logprobs = [] if choice.logprobs is None else list(choice.logprobs.content)
        if (text := delta.content or "") or (logprobs and self._grows("text")):
            logprobs, self._held_logprobs = self._held_logprobs + logprobs, []
            yield from self._text(text, logprobs)
        elif delta.content is not UNSET:  # those of reasoning, markers and calls are shown nowhere
            self._held_logprobs += logprobs
        for call in delta.tool_calls or ():
            if call.id and call.function.name:
                self._held, self._held_logprobs = "", []
                yield from self._open(TurnItem("call", len(self.items), call.function.name, call.id))
            if call.function.arguments:
                yield from self._grow("call", call.function.arguments, [])
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason or None

    def _text(self, text: str, logprobs: list[wire.TokenLogprob]) -> Iterator[StreamEvent]:
        if not self._grows("text"):
            text, self._held = self._held + text, ""
            if not text.strip() and not logprobs:
                self._held = text
                return
        yield from self._grow("text", text, logprobs)

    def _grows(self, kind: str) -> bool:
        return self._is_open and self.items[-1].kind == kind

    def _grow(
        self, kind: Literal["text", "reasoning", "call"], text: str, logprobs: list[wire.TokenLogprob]
    ) -> Iterator[StreamEvent]:
        if not self._grows(kind):
            yield from self._open(TurnItem(kind, len(self.items)))
        item = self.items[-1]
        item.parts.append(text)
        item.logprobs.extend(logprobs)
        yield from self.grown(item, text, logprobs)

    def _open(self, item: TurnItem) -> Iterator[StreamEvent]:
        yield from self._close()
        self.items.append(item)
        self._is_open = True
        yield from self.opened(item)

    def _close(self) -> Iterator[StreamEvent]:
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.items[-1])


@contextmanager
def with_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of a chat in errors. `names`: a chat's, longer ones first -> the caller's."""
    try:
        yield
    except InvalidRequestError as error:
        raise _renamed(error, names) from error


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """In the name of the field, and in the message where it stands in backquotes or is advised to be lowered."""
    message, param = str(error), error.param or ""
    for old, new in names.items():
        whole = re.escape(old) + ("" if old.endswith(".") else r"(?!\w)")
        message = re.sub(rf"(?<=[`\]]){whole}|(?<=lower ){whole}", new, message)
        param = re.sub(whole if old.startswith(".") else f"^{whole}", new, param)
    return InvalidRequestError(message, param=param or None, code=error.code)


def fields_in_common(schema: type[RequestFields], translated: frozenset[str]) -> tuple[str, ...]:
    """Names that are passed on to a chat as they came: those that work in both, but for `translated`."""
    chat, own = ChatFields.model_fields, schema.model_fields
    unserved = marked(chat).keys() | marked(own).keys()
    return tuple(name for name in chat if name in own and name not in unserved | translated)
