"""The chat template of an adapter in place of the base's. Its writer is not trusted, so processes render it, with
limits of time, memory and output (`template_worker.py`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from lora_serve.adapters.checkpoint.chat_template import BaseTemplates, ChatTemplates
from lora_serve.core.errors import AdapterUnavailableError, InvalidRequestError
from lora_serve.core.worker_processes import CLOSED, Worker, WorkerPool
from lora_serve.text.marked import Marked, Marks, packed
from lora_serve.text.template import ChatTemplate, TemplateInput, cut_continued

if TYPE_CHECKING:
    from lora_serve.core.model_spec import ModelSpec
    from lora_serve.text.tokenizer import TextModel

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates, as transformers has them
_WORKER = "lora_serve.text.template_worker"
SECONDS = 0.5
_ANSWER_SECONDS = 10.0  # the process ends by itself long before, unless the machine stands still
_MIN_CHARACTERS = 2**20  # that any chat may have
_GROWTH = 8  # characters that a template may write for each that it is given


class TemplateFaultError(Exception):
    """The template itself is wrong, or refuses what it was given. `line`: where, if that is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class TemplateLimitError(Exception):
    """The template asks for more than it may have."""


class TemplateProcesses:
    """Every method may be called from any thread, and waits."""

    def __init__(self, num_processes: int = 2, seconds: float = SECONDS) -> None:
        """`seconds`: of the processor, for one template."""
        self._pool = WorkerPool(_WORKER, str(seconds), num_processes=num_processes)

    def fault_in(self, source: str) -> str | None:
        """The reason why a text is no template; None: it is one. Raises AdapterUnavailableError."""
        try:
            self._ask({"source": source}, 0)
        except (TemplateFaultError, TemplateLimitError) as error:
            return str(error)
        return None

    def render(self, source: str, names: Mapping[str, Any], marks: Marks | None = None) -> Marked:
        """The text that a template writes. `marks`: of the marked texts in `names`.

        Raises TemplateFaultError, TemplateLimitError, AdapterUnavailableError.
        """
        meanings = {} if marks is None else dict(marks.meanings)
        answer = self._ask(
            {"source": source, "render": {"names": packed(names), "meanings": meanings}}, _MIN_CHARACTERS
        )
        meaning = str.__str__ if marks is None else marks.meaning
        return Marked(str(answer["text"]), str(answer["true"]), meaning)

    def close(self) -> None:
        """End the processes; those at work when they have answered."""
        self._pool.close()

    def _ask(self, job: dict[str, Any], max_characters: int) -> dict[str, Any]:
        frame = _frame(job)
        most = max(max_characters, _GROWTH * len(frame))
        try:
            with self._pool.worker() as worker:
                answer = _answer_of(worker, _frame({**job, "max_characters": most}), most)
        except CLOSED as error:
            raise AdapterUnavailableError(
                "The adapter's chat template cannot be rendered at present; try again."
            ) from error
        if "limit" in answer:
            raise TemplateLimitError(str(answer["limit"]))
        if "error" in answer:
            raise TemplateFaultError(str(answer["error"]), answer.get("line"))
        return answer


def _frame(job: Mapping[str, Any]) -> bytes:
    return json.dumps(job).encode()  # ASCII, so that halves of surrogate pairs survive


def _answer_of(worker: Worker, frame: bytes, max_characters: int) -> dict[str, Any]:
    """The answer to a job. Raises TemplateLimitError if there is none."""
    try:
        found = json.loads(worker.ask(frame, seconds=_ANSWER_SECONDS, max_bytes=12 * max_characters + 2**16))
    except (*CLOSED, ValueError, RecursionError):
        raise TemplateLimitError("it takes more time or memory than there may be") from None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class TemplateTexts:
    """The content of a template: texts by name and special tokens by name, sorted."""

    texts: tuple[tuple[str, str], ...]
    special_tokens: tuple[tuple[str, str], ...] = ()


class AdapterChatTemplate(ChatTemplate):
    """See ChatTemplate. Its methods wait for a process, so no event loop may call them: `thread` runs what does."""

    owner = "adapter"

    def __init__(
        self,
        base: ChatTemplate,
        content: TemplateTexts,
        processes: TemplateProcesses,
        thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """`base`: of the model, whose special tokens count where the adapter has none of its own."""
        self.texts = dict(content.texts)
        self.source = self.texts.get(DEFAULT, "")
        self.tools_source = self.texts.get(WITH_TOOLS) or self.source
        self.special_tokens = base.special_tokens | dict(content.special_tokens)
        self._processes = processes
        self.thread = thread

    def render(self, given: TemplateInput) -> str:
        return str.__str__(self.render_marked(given, None))

    def render_marked(self, given: TemplateInput, marks: Marks | None) -> Marked:
        source = self.tools_source if given.tools else self.source
        try:
            found = self._processes.render(source, given.variables(self.special_tokens), marks)
        except TemplateFaultError as error:
            raise jinja2.TemplateError(str(error)) from None
        except TemplateLimitError as error:
            message = f"The adapter's own chat template cannot be rendered for these messages: {error}."
            raise InvalidRequestError(message, param="messages") from None
        return cut_continued(found) if given.is_continued else found


_Chat = Sequence[Mapping[str, Any]]
_SYSTEM, _USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Good day"}
_CHATS = ([_USER], [_USER, _ANSWER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])
_TOOL = {"name": "weather", "description": "The weather.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _TOOL}]


def trial_faults(
    processes: TemplateProcesses, texts: Mapping[str, str], special_tokens: Mapping[str, Any]
) -> dict[str, str]:
    """The reasons, by the template's name, why no chat could be written with it. Raises AdapterUnavailableError."""
    used = (name for name in (DEFAULT, WITH_TOOLS) if name in texts)
    faults = {name: _fault(processes, name, texts[name], special_tokens) for name in used}
    return {name: fault for name, fault in faults.items() if fault is not None}


def _fault(processes: TemplateProcesses, name: str, source: str, special_tokens: Mapping[str, Any]) -> str | None:
    """The reason why a template fails for every chat, that of the simplest one; None: it writes at least one."""
    chats: list[tuple[_Chat, _Chat | None]] = [(chat, None) for chat in _CHATS] if name == DEFAULT else []
    if name == WITH_TOOLS or "tools" in source:
        chats += [(chat, _TOOLS) for chat in _CHATS[::2]]
    first: str | None = None
    for messages, tools in chats:
        names: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None}
        try:
            processes.render(source, {**names, "add_generation_prompt": messages[-1] is _USER, **special_tokens})
        except TemplateFaultError as error:
            first = first or (str(error) if error.line is None else f"line {error.line}: {error}")
        except TemplateLimitError as error:
            first = first or str(error)
        else:
            return None
    return first and f"no chat can be written with it: {first}"


def base_templates(text: TextModel, spec: ModelSpec, processes: TemplateProcesses, rule: str) -> BaseTemplates | None:
    """The base's chat template, with which adapters' own are compared; None for a model that has no chats."""
    if spec.pooling is not None:
        return None
    own = ChatTemplates(text.template.texts, text.template.special_tokens)

    def faults_in_chats(found: ChatTemplates) -> Mapping[str, str]:
        return trial_faults(processes, found.texts, {**own.special_tokens, **found.special_tokens})

    return BaseTemplates(
        own,
        processes.fault_in,
        faults_in_chats,
        is_token=lambda token: text.token_id(token) is not None,
        are_kept=rule != "off",
    )
