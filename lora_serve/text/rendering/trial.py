"""Small chats on which a template is tried before its adapter is taken: one that fails for all of them is no use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_serve.text.rendering.processes import TemplateFaultError, TemplateLimitError, TemplateProcesses

_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # the names of templates that chats have
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
    faults = {name: _fault(processes, name, texts[name], special_tokens) for name in _used(texts)}
    return {name: fault for name, fault in faults.items() if fault is not None}


def _used(texts: Mapping[str, str]) -> Iterator[str]:
    return (name for name in (_DEFAULT, _WITH_TOOLS) if name in texts)


def _fault(processes: TemplateProcesses, name: str, source: str, special_tokens: Mapping[str, Any]) -> str | None:
    """The reason why a template fails for every chat, that of the simplest one; None: it writes at least one."""
    chats: list[tuple[_Chat, _Chat | None]] = [(chat, None) for chat in _CHATS] if name == _DEFAULT else []
    if name == _WITH_TOOLS or "tools" in source:
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
