"""Formats found in chat templates, of tool calls and of reasoning."""

from __future__ import annotations

import pytest

from lora_serve.core.setting_types import names_in
from lora_serve.text import reasoning, tool_calls
from tests.text.chat_families import FAMILIES
from tests.text.tool_calls.templates import REASONING, TOOL_CALLS

_THINKING = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "smollm3", "deepseek", "glm4_5"), "deepseek_r1"),
    "gpt_oss": "openai_gptoss",
}


def name_of(found: object) -> str | None:
    return None if found is None else type(found).__module__.rsplit(".", 1)[1]


@pytest.mark.parametrize("family", TOOL_CALLS)
def test_template_with_tools(family: str) -> None:
    template, expected = TOOL_CALLS[family]
    assert name_of(tool_calls.found_in(template)) == expected
    assert name_of(reasoning.found_in(template)) == REASONING.get(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_template_without_tools(family: str) -> None:
    assert tool_calls.found_in(FAMILIES[family].template) is None
    assert name_of(reasoning.found_in(FAMILIES[family].template)) == _THINKING.get(family)


def test_no_template_fits_two_formats() -> None:
    templates = [template for template, _ in TOOL_CALLS.values()] + [family.template for family in FAMILIES.values()]
    for template in templates:
        for names, form in (
            (names_in("text/tool_calls"), tool_calls.tool_call_format),
            (names_in("text/reasoning"), reasoning.reasoning_format),
        ):
            assert sum(form(name).matches(template) for name in names) <= 1


def test_every_format_but_json_is_found_in_some_template() -> None:
    assert {expected for _, expected in TOOL_CALLS.values()} - {None} == set(names_in("text/tool_calls")) - {"json"}
    assert {*REASONING.values(), *_THINKING.values()} == set(names_in("text/reasoning"))


def test_two_formats_in_one_template_are_none() -> None:
    assert tool_calls.found_in("<tool_call></tool_call>[TOOL_CALLS]") is None


def test_names_of_vllm_name_formats() -> None:
    for names, form in (
        (tool_calls.names(), tool_calls.tool_call_format),
        (reasoning.names(), reasoning.reasoning_format),
    ):
        assert list(names) == sorted(set(names))
        assert all(form(name) for name in names)
    for name, format_name in {
        "qwen": "hermes",
        "granite4": "hermes",
        "qwen3_xml": "qwen3_coder",
        "glm47": "glm45",
    }.items():
        assert name_of(tool_calls.tool_call_format(name)) == format_name
