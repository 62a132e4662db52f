"""Adapters' own templates: rendered as transformers renders the base's, and whatever one does, it ends."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text import template_worker
from lora_serve.text.adapter_template import (
    SECONDS,
    AdapterChatTemplate,
    TemplateFaultError,
    TemplateLimitError,
    TemplateProcesses,
    TemplateTexts,
    trial_faults,
)
from lora_serve.text.chat import parse_messages, render_chat
from lora_serve.text.template import TemplateInput
from lora_serve.text.tokenizer import TextModel
from tests.attempts import in_some_attempt
from tests.text.chat_families import FAMILIES, wrapper_of

PLACES = ("system", "user", "assistant", "last")
SAID = (
    "Hi",
    " two \n",
    "Grüße, 你好 😀 {{ x }} {% y %}",
    "<|",
    "a <|im_end|> b</s>",
    "<think>x</think>",
    "[INST] <b>",
)
MAX_SECONDS = 2.0
ALONE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(seconds=0.15)
    yield made
    made.close()


async def _never(work: object) -> None:
    raise AssertionError


def with_own(text: TextModel, source: str, processes: TemplateProcesses) -> TextModel:
    content = TemplateTexts((("default", source),))
    return text.with_template(AdapterChatTemplate(text.template, content, processes, _never))


def chat(place: str, content: str) -> list[dict[str, str]]:
    said = {"system": "Be kind.", "user": "How?", "assistant": "So.", "last": "And now?"} | {place: content}
    roles = {"system": "system", "user": "user", "assistant": "assistant", "last": "user"}
    return [{"role": roles[at], "content": said[at]} for at in roles if at != "system" or place == "system"]


def ids_of(text: TextModel, messages: list[dict[str, str]], **options: bool) -> tuple[int, ...] | str:
    """The token ids, or the words of the refusal."""
    try:
        return text.encode_chat(render_chat(text, parse_messages(messages), **options), False)
    except InvalidRequestError as error:
        return str(error).removeprefix(f"The {text.template.owner}'s ")


@pytest.mark.parametrize("name", FAMILIES)
def test_same_template_gives_the_same_ids_beside_an_adapter_as_in_the_base(
    name: str, processes: TemplateProcesses
) -> None:
    base = TextModel(wrapper_of(name))
    assert trial_faults(processes, base.template.texts, base.template.special_tokens) == {}
    own = with_own(base, base.template.source, processes)
    for place in PLACES:
        for content in SAID:
            messages = chat(place, content)
            assert ids_of(own, messages) == ids_of(base, messages), (place, content)
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    for content in ("Hel", "a <| ", " <b>  "):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        assert ids_of(own, messages, **continued) == ids_of(base, messages, **continued)


def test_what_templates_can_use_is_as_in_transformers(processes: TemplateProcesses) -> None:
    text = TextModel(wrapper_of("chatml"))
    source = (
        "{% set ns = namespace(found=[], self=1) %}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
        "{% set ns.found = ns.found + [m.role] %}{% endfor %}{{ ns.found|tojson(indent=2) }}{{ dict(a=1)|tojson }}\n"
        "  {% generation %}\n{{ messages[0].content|upper }}{% endgeneration %}{{ strftime_now('%Y') }}{{ 1 ~ 'é' }}"
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('<') }}{{ messages|map(attribute='role')|join(',') }}"
    )
    own = with_own(text, source, processes)
    conversation = [{"role": "user", "content": "x <y>"}, {"role": "assistant", "content": "z"}]
    theirs = text.wrapper.apply_chat_template(conversation, chat_template=source, tokenize=False)
    found = own.template.render(TemplateInput(conversation, add_generation_prompt=False))
    assert found == theirs
    for wrong in ("{{ raise_exception('no tools here') }}", "{{ namespace(_x=1) }}", "{{ messages.x.y }}"):
        own = with_own(text, wrong, processes)
        with pytest.raises(jinja2.TemplateError) as ours:
            own.template.render(TemplateInput(conversation, add_generation_prompt=False))
        with pytest.raises(jinja2.TemplateError) as expected:
            text.wrapper.apply_chat_template(conversation, chat_template=wrong, tokenize=False)
        if "namespace" not in wrong:
            assert str(ours.value) == str(expected.value)


GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(64) %%}{%% set ns.x = %s %%}{%% endfor %%}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "a huge text": "{{ 'a' * 10 ** 10 }}",
    "huge texts again and again": "{% for a in range(999) %}{% set x = messages[0].content * 10 ** 5 %}{% endfor %}",
    "a huge join": "{{ (['x' * 1000000] * 100000)|join }}",
    "a text that doubles": GROWING % ("'ab'", "ns.x + ns.x") + "{{ ns.x }}",
    "a text replaced by itself": GROWING % ("'ab'", "ns.x.replace('a', ns.x)"),
    "a recursive macro": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "an include": "{% include 'x' %}",
    "an import": "{% import '/etc/passwd' as x %}{{ x }}",
    "center": "{{ 'x'|center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width of format": "{{ '{:>9999999999}'.format(1) }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "numbers": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x ** 99 %}{% endfor %}{{ ns.x }}",
    "JSON of a billion": GROWING % ("[1]", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
    "a comparison of billions": GROWING % ("[[1], [1]]", "[[ns.x[0]] * 2, [ns.x[1]] * 2]") + "{{ ns.x[0] == ns.x[1] }}",
    "a hash of a billion": GROWING % ("(1,)", "(ns.x, ns.x)") + "{{ {ns.x: 1}|length }}",
    "every letter with every other": "{% for a in messages[0].content * 99 %}{% for b in messages[0].content * 99 %}"
    "{% for c in messages[0].content %}{{ c }}{% endfor %}{% endfor %}{% endfor %}",
    "lists": "{{ range(10)|slice(10 ** 9)|list }}",
    "generators": "{{ range(99999)|map('string')|map('center', 9999)|list|length }}",
    "Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "half a surrogate pair": "{{ '\\ud800' }}",
    "a string's format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_ends_within_two_seconds_and_the_next_one_is_rendered(
    name: str, processes: TemplateProcesses
) -> None:
    names = {"messages": [{"role": "user", "content": "x" * 2000}]}

    def end_soon() -> None:
        began = time.thread_time(), time.monotonic()
        with pytest.raises((TemplateFaultError, TemplateLimitError)):
            processes.render(HOSTILE[name], names)
        assert time.thread_time() - began[0] < 0.1  # this process does not feel it
        assert time.monotonic() - began[1] < 5 * MAX_SECONDS  # on a busy machine; see the limits of the processor below

    in_some_attempt(end_soon)
    assert processes.render(ALONE, {"messages": [{"content": "next"}]}) == "next"


def test_limits_leave_a_hostile_template_less_than_two_seconds() -> None:
    assert SECONDS * template_worker.KILLED_AFTER < MAX_SECONDS / 2
    assert list(inspect.signature(TemplateProcesses).parameters.values())[-1].default == SECONDS


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for x in y %}", "line 1"),
        ("{{ x\n\n}", "line"),
        ("{% unknown %}", "unknown tag"),
        ("{{ x|no_such_filter }}", "no_such_filter"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recursion"),
    ],
)
def test_text_that_is_no_template_is_told_so(source: str, said: str, processes: TemplateProcesses) -> None:
    assert said in (processes.fault_in(source) or "")


def test_compiling_is_limited_too(processes: TemplateProcesses) -> None:
    def end_soon() -> None:
        began = time.monotonic()
        processes.fault_in("{{ (['x' * 1000000] * 100000)|join }}{{ 2 ** 99999999 }}{{ [1] * 10 ** 9 }}")
        assert time.monotonic() - began < 5 * MAX_SECONDS

    in_some_attempt(end_soon)
    assert processes.fault_in(ALONE) is None


def test_process_has_bounded_memory_no_files_and_nothing_of_the_servers_environment(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-server")
    with_process = TemplateProcesses(1)
    assert with_process.fault_in(ALONE) is None
    (process,) = with_process._pool._idle
    proc = Path(f"/proc/{process._process.pid}")
    assert b"secret-of-the-server" not in (proc / "environ").read_bytes()
    limits = {line[:26].strip(): line[26:].split()[0] for line in (proc / "limits").read_text().splitlines()}
    assert (limits["Max open files"], limits["Max file size"], limits["Max core file size"]) == ("0", "0", "0")
    assert int(limits["Max address space"]) < template_worker.MEMORY_BYTES + 512 * 2**20
    with_process.close()
    assert process._process.poll() is not None


def test_killed_process_is_replaced(processes: TemplateProcesses) -> None:
    own = TemplateProcesses(1)
    assert own.fault_in(ALONE) is None
    own._pool._idle[0]._process.kill()
    with pytest.raises(TemplateLimitError):
        own.render(ALONE, {"messages": [{"content": "x"}]})
    assert own.render(ALONE, {"messages": [{"content": "x"}]}) == "x"
    own.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler('a').next }}", "{{ 'a'.upper ~ '' }}", "{{ lipsum|string }}", "{{ [cycler]|join }}",
        "{{ '%s' % cycler }}", "{{ '{}'.format(lipsum) }}", "{{ '{0.upper}'.format('a') }}", "{{ {'a': [lipsum]} }}",
        "{{ [cycler('a')]|map(attribute='next')|join }}", "{{ ['a']|map('upper') }}", "{{ raise_exception(lipsum) }}",
        "{% for i in [1] %}{{ loop }}{% endfor %}", "{{ namespace(a=1) }}", "{{ u|default(cycler) }}",
    ],
)  # fmt: skip
def test_template_writes_no_address_of_its_process(source: str, processes: TemplateProcesses) -> None:
    with pytest.raises(TemplateFaultError) as told:
        processes.render(source, {"messages": []})
    assert "0x" not in str(told.value)
    assert processes.render("{{ ['a', 1]|map('upper')|list }}{{ {'a': 1}.values()|list }}", {}) == "['A', '1'][1]"
