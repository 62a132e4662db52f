"""What every format of tool calls must do; each format inherits the class."""

# ruff: noqa: RUF001 - the markers of DeepSeek

from __future__ import annotations

import ast
import itertools
import json
import re
import time
import warnings
from abc import ABC, abstractmethod
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.core.setting_types import names_in
from lora_serve.text.grammars.checking import GrammarCompiler, checked_own_text
from lora_serve.text.tool_calls import tool_call_format
from lora_serve.text.tool_calls.base import CallArguments, Tool, ToolCallFormat
from lora_serve.text.typed_text import KINDS, typed
from tests.attempts import in_some_attempt
from tests.text.tool_calls.calls import (
    TOOLS,
    WEATHER,
    Answer,
    Call,
    accepts,
    byte_tokenizer,
    parsed,
    pieces_of,
    token_ids,
    walks,
)
from tests.tiers import by_tier, mostly_nightly

Calls = list[tuple[str, dict[str, Any]]]
KEYS = st.from_regex(r"[a-z][a-z_]{0,7}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
CALLS = st.lists(
    st.tuples(st.sampled_from(["get_weather", "f", "nobody-knows"]), st.dictionaries(KEYS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
SOME: Calls = [
    ("get_weather", {"city": 'Köln "am" Rhein', "days": 3}),
    ("f", {"deep": [{"a": [1, {}, []]}, "}]", None], "ok": True}),
    ("now", {}),
]
CUTS = st.lists(st.integers(0, 10**6), max_size=12)
PIECES = ["{", "}", "[", "]", '"', "'", "\\", ":", ",", " ", "\n", "name", "arguments", "a=1", "(", ")", ";", "x", "<"]


def nested(depth: int, width: int) -> dict[str, Any]:
    """An object of so many members, of which the last is such an object."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        members: dict[str, Any] = {f"a{number}": {"const": 1} for number in range(width)}
        schema = {"type": "object", "properties": {**members, "z": schema}, "required": list(members)}
    return schema


class ToolCallContract(ABC):
    name: str
    takes_content_before = True  # text may stand before the first call
    num_walks = 14  # of random answers, of which one at least has several calls

    @abstractmethod
    def write(self, calls: Calls) -> str:
        """Calls as models of this format write them."""

    @abstractmethod
    def test_no_object_as_arguments_is_content(self) -> None: ...

    @property
    def format(self) -> ToolCallFormat:
        return tool_call_format(self.name)

    def read(self, *pieces: str) -> Answer:
        return parsed(self.format.parser(TOOLS), pieces)

    def fragments(self) -> list[str]:
        """Pieces from which hostile texts are put together."""
        text = self.write(SOME)
        halves = [marker[: len(marker) // 2 + 1] for marker in self.format.markers]
        return [*PIECES, *self.format.markers, *halves, text, text[: len(text) // 2], self.write(SOME[:1])]

    def test_is_the_file_of_its_name(self) -> None:
        assert type(self.format).__module__.endswith(f".tool_calls.{self.name}")

    def test_single_characters_change_nothing(self) -> None:
        text = self.write(SOME)
        assert self.read(*text) == self.read(text)

    def is_cut_call(self, text: str, answer: Answer) -> bool:
        """The text ends in a call of which not even the name came."""
        return any(marker in text for marker in self.format.markers) and text.startswith(answer.content)

    def test_calls_do_not_show_and_text_around_them_does(self) -> None:
        before = "I shall look.\n" if self.takes_content_before else ""
        answer = self.read(f"{before}{self.write(SOME)}\n")
        assert answer.order == [before, 0, 1, 2][not before :]
        assert answer.content == before

    def test_blank_text_alone_is_kept(self) -> None:
        assert self.read("\n ", " ").order == ["\n  "]
        assert self.read().order == []

    def test_every_beginning_gives_what_came(self) -> None:
        text, whole = self.write(SOME), self.read(self.write(SOME))
        for length in range(len(text)):
            answer = self.read(text[:length])
            assert text.startswith(answer.content)
            assert not answer.content or not answer.calls, "a call that is cut shows as text"
            for number, call in enumerate(answer.calls):
                assert call.name == whole.calls[number].name
                assert whole.calls[number].arguments.startswith(call.arguments)

    def test_arguments_come_as_they_are_written(self) -> None:
        text = self.write([("f", {"text": "ten letters " * 5, "more": "of them " * 5})])
        parser = self.format.parser(TOOLS)
        num_pieces = sum(bool(parser.feed(character)) for character in text)
        assert num_pieces > 60, "the arguments are held back"

    def test_ordinary_text_is_held_back_no_longer_than_a_marker(self) -> None:
        longest = max(map(len, self.format.markers), default=0)
        parser, num_out = self.format.parser(TOOLS), 0
        text = "a plain sentence, 1 < 2 [sic] {really} `so` " * 5
        for number, character in enumerate(text, 1):
            num_out += sum(len(event.text) for event in parser.feed(character))
            assert number - num_out <= longest
        assert num_out + sum(len(event.text) for event in parser.finish()) == len(text)

    def test_unknown_name_is_passed_on(self) -> None:
        assert [call.name for call in self.read(self.write([("not_among_them", {})])).calls] == ["not_among_them"]

    def test_calls_do_not_share_state(self) -> None:
        first, second = self.format.parser(TOOLS), self.format.parser(TOOLS)
        text = self.write(SOME)
        first.feed(text[:20])
        assert parsed(second, [text]) == self.read(text)

    @pytest.mark.parametrize("where", mostly_nightly(["content", "arguments", "hostile"], "arguments", "hostile"))
    def test_time_is_linear_in_single_characters(self, where: str) -> None:
        def seconds(size: int) -> float:
            body = ("x y " * (size // 4), json.dumps("x \n\\ " * (size // 9)), "".join(self.fragments()) * size)
            text = {
                "content": body[0],
                "arguments": self.write([("f", {"a": body[1]})]),
                "hostile": body[2][:size],
            }[where]
            parser, started = self.format.parser(TOOLS), time.process_time()
            for character in text:
                parser.feed(character)
            parser.finish()
            return time.process_time() - started

        def is_linear() -> None:
            small = min(seconds(2_000) for _ in range(3))
            assert seconds(20_000) < 30 * small + 0.05, "ten times the text takes a hundred times as long"

        in_some_attempt(is_linear)

    @pytest.mark.nightly
    @pytest.mark.parametrize("is_cut", [False, True])
    def test_a_megabyte_is_no_burden(self, is_cut: bool) -> None:
        text = self.write([("f", {"a": "x \n\\ " * 170_000})])
        parser, started = self.format.parser(TOOLS), time.process_time()
        events = [event for piece in (text if is_cut else [text]) for event in parser.feed(piece)]
        assert time.process_time() - started < 20.0
        assert sum(len(event.text) for event in events if isinstance(event, CallArguments)) > 1_000_000

    @pytest.mark.crossed
    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("kind", ["text", "special", "added"])
    def test_parser_reads_what_the_grammar_allows(self, kind: str, parallel: bool) -> None:
        markers = self.format.markers
        tokenizer = byte_tokenizer(markers if kind == "special" else (), markers if kind == "added" else ())
        tools = {tool.name: tool for tool in TOOLS}
        numbers = set()
        for text in walks(self.format, TOOLS, tokenizer, self.num_walks if parallel else 4, parallel=parallel):
            answer = self.read(*text)
            assert answer.content == "", text
            assert answer.calls, text
            numbers.add(len(answer.calls))
            for call in answer.calls:
                jsonschema.validate(json.loads(call.arguments), dict(tools[call.name].parameters))
        assert (max(numbers) > 1) if parallel else numbers == {1}

    def test_special_markers_are_produced_as_tokens(self) -> None:
        markers = self.format.markers
        tokenizer = byte_tokenizer(markers)
        for text in walks(self.format, [WEATHER], tokenizer, 3, parallel=False):
            for marker in markers:
                assert marker not in text or tokenizer.token_to_id(marker) in tokenizer.encode(text).ids

    def test_grammar_allows_what_models_write(self) -> None:
        tokenizer = byte_tokenizer(self.format.markers)
        ids = token_ids(tokenizer, self.format.markers)
        for parallel, calls in ((False, SOME[:1]), (True, SOME[:1] * 3)):
            grammar = self.format.grammar(TOOLS, parallel=parallel, token_ids=ids)
            written = self.write([(name, {"city": "Ulm", "days": 3}) for name, _ in calls]).replace("'", '"')
            assert accepts(grammar, tokenizer, written), (written, grammar)
            assert not accepts(grammar, tokenizer, self.write([("f", {})]))
            assert not accepts(grammar, tokenizer, f"Well. {written}")

    @pytest.mark.parametrize("word", ["minLength", "maxLength", "minItems", "maxItems"])
    def test_numbers_cannot_break_out_of_the_grammar(self, word: str) -> None:
        wild = {"type": ["string", "array"], word: "5}/ #"}
        tool = Tool("f", parameters={"type": "object", "properties": {"a": wild}, "required": ["a"]})
        try:
            text = self.format.grammar([tool], parallel=False, token_ids={})
        except (ValueError, InvalidRequestError):  # both are answered with 400, as a schema that is none
            return
        assert "5}/ #" not in re.sub(r"%json .*", "", text)

    @pytest.mark.parametrize("kind", ["members", "references"])
    def test_more_members_than_the_compiler_can_follow_are_refused(self, kind: str) -> None:
        names = [f"a{number}" for number in range(3000)]
        chain: dict[str, Any] = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
        parameters: dict[str, Any] = {
            "members": {"properties": {name: {"const": 1} for name in names}, "required": names},
            "references": {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**chain, names[-1]: {}}},
        }[kind]
        tool, config = Tool("f", parameters={"type": "object", **parameters}), GrammarConfig()

        def compiled() -> str:
            text = self.format.grammar([tool], parallel=False, token_ids={})
            return checked_own_text(text, "tools", GrammarCompiler({}, 300, config), config)

        with pytest.raises((InvalidRequestError, RecursionError)):  # both are 400
            compiled()

    def test_names_and_schemas_cannot_break_out_of_the_grammar(self) -> None:
        wild = {"type": "object", "properties": {"a": {"const": 'end"\n%json {}'}}, "required": ["a"]}
        tool = Tool("f", parameters=wild)
        (text,) = walks(self.format, [tool], byte_tokenizer(self.format.markers), 1, parallel=False)
        assert json.loads(self.read(text).calls[0].arguments) == {"a": 'end"\n%json {}'}


class TestHermes(ToolCallContract):
    name = "hermes"

    def write(self, calls: Calls) -> str:
        blocks = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
        return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)

    def test_no_object_as_arguments_is_content(self) -> None:
        for arguments in ("[1]", '"{}"', "null", "3"):
            text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            assert self.read(text).order == [text]

    def test_name_that_is_too_long_is_text_and_a_call_in_it_a_call(self) -> None:
        text = '<tool_call>{"name": "' + "x" * 300
        for pieces in ([text + self.write(SOME[:1])], text + self.write(SOME[:1])):
            assert self.read(*pieces).order == [text, 0]


class TestJson(ToolCallContract):
    name = "json"
    takes_content_before = False

    def write(self, calls: Calls) -> str:
        objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return json.dumps(objects[0] if len(objects) == 1 else objects)

    def test_no_object_as_arguments_is_content(self) -> None:
        text = '{"name": "f", "arguments": [1]}'
        assert self.read(text).order == [text]

    def test_name_alone_is_a_call_only_of_a_known_tool(self) -> None:
        assert self.read('{"name": "Ada"}').order == ['{"name": "Ada"}']
        assert self.read('{"name": "now"}').calls == [Call("now", "{}")]
        assert self.read('{"name": "now", "argum').calls == [Call("now", "")]

    def test_object_of_another_kind_is_content(self) -> None:
        for text in ('{"name": "Ada", "born": 1815}', '[{"a": 1}]', "[1, 2]", "{}", '{"na', '[{"name": "f"'):
            assert self.read(text).order == [text]

    def test_arguments_may_stand_before_the_name(self) -> None:
        text = '{"type": "function", "id": 3, "parameters": {"a": 1}, "name": "f", "more": [{}]}'
        assert self.read(*text).calls == [Call("f", '{"a": 1}')]

    def begins_a_marker(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self.format.markers)

    def is_cut_call(self, text: str, answer: Answer) -> bool:
        return False


class TestLlama3Json(ToolCallContract):
    name = "llama3_json"
    takes_content_before = False

    def write(self, calls: Calls) -> str:
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)

    def test_no_object_as_arguments_is_content(self) -> None:
        for text in ('{"name": "f", "parameters": "x"}', '<|python_tag|>{"name": "f", "parameters": [1]}'):
            assert self.read(text).order == [text]

    def test_tag_may_stand_after_text_and_before_code(self) -> None:
        call = '{"name": "f", "arguments": {}}'
        assert self.read(f"Well. <|python_tag|>{call};<|python_tag|> {call}").order == ["Well. ", 0, 1]
        assert self.read("<|python_tag|>print(1)").order == ["<|python_tag|>print(1)"]
        assert self.read(f"{call}; and so on").order == [0, "; and so on"]


class TestMistral(ToolCallContract):
    name = "mistral"

    def write(self, calls: Calls) -> str:
        return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])

    def test_no_object_as_arguments_is_content(self) -> None:
        for text in ('[TOOL_CALLS] [{"name": "f", "arguments": "x"}]', "[TOOL_CALLS]f[1]", "[TOOL_CALLS] {}"):
            assert self.read(text).order == [text]

    @pytest.mark.parametrize("between", ["", "[ARGS]", "[CALL_ID]vvMfOCoJ7[ARGS]", "\n"])
    def test_newer_form(self, between: str) -> None:
        text = "".join(f"[TOOL_CALLS]{name}{between}{json.dumps(arguments)}" for name, arguments in SOME)
        answer = self.read("Well.", *text)
        assert answer.order == ["Well.", 0, 1, 2]
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == SOME


class TestDeepSeekV3(ToolCallContract):
    name = "deepseek_v3"

    def write(self, calls: Calls) -> str:
        blocks = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"

    def test_no_object_as_arguments_is_content(self) -> None:
        text = (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]\n```<｜tool▁call▁end｜>"
        )
        assert self.read(text).order == [text]


class TestDeepSeekV31(ToolCallContract):
    name = "deepseek_v31"

    def write(self, calls: Calls) -> str:
        blocks = (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return "<｜tool▁calls▁begin｜>" + "".join(blocks) + "<｜tool▁calls▁end｜>"

    def test_no_object_as_arguments_is_content(self) -> None:
        text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"
        assert self.read(text).order == [text]


class TestGemma4(ToolCallContract):
    name = "gemma4"
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def write(self, calls: Calls) -> str:
        return "".join(f"{self.begin}call:{name}{self.value(arguments)}{self.end}" for name, arguments in calls)

    def value(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self.value, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self.value(inner)}' for key, inner in value.items())}}}"
        return json.dumps(value)

    def test_no_object_as_arguments_is_content(self) -> None:
        for text in (f"{self.begin}call:f[1]{self.end}", f"{self.begin}f{{}}{self.end}", f"{self.begin}call:{{}}"):
            assert self.read(text).order == [text]

    def test_string_may_hold_anything_but_its_own_marker(self) -> None:
        text = f'"}}],:\\ \n{self.end[:-1]} {self.quote[:-1]}'
        assert json.loads(self.read(*self.write([("f", {"a": text})])).calls[0].arguments) == {"a": text}

    def test_grammar_writes_recursive_and_mixed_schemas(self) -> None:
        tree = {
            "type": "object",
            "properties": {
                "name": {"type": ["string", "null"], "maxLength": 3},
                "kind": {"anyOf": [{"const": 1}, {"enum": ["a", None, [True]]}]},
                "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["name", "kind"],
        }
        tool = Tool("f", parameters={**tree, "$defs": {"tree": tree}})
        for text in walks(self.format, [tool], byte_tokenizer(self.format.markers), 20, parallel=False):
            jsonschema.validate(json.loads(self.read(*text).calls[0].arguments), dict(tool.parameters))

    def test_more_names_than_the_compiler_can_follow_are_refused(self) -> None:
        for parameters in ({"required": [f"a{number}" for number in range(3000)]}, nested(20, 60)):
            with pytest.raises(InvalidRequestError, match="members"):
                self.format.grammar([Tool("f", parameters=parameters)], parallel=False, token_ids={})

    def test_schema_that_cannot_be_forced_is_refused_in_words(self) -> None:
        for schema, word in (({"type": "string", "pattern": "x"}, "pattern"), ({"allOf": [{}]}, "allOf")):
            tool = Tool("f", parameters={"type": "object", "properties": {"a": schema}})
            with pytest.raises(InvalidRequestError, match=word):
                self.format.grammar([tool], parallel=False, token_ids={})


class TestFunctionGemma(TestGemma4):
    name = "functiongemma"
    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"


class TestPythonic(ToolCallContract):
    name = "pythonic"
    takes_content_before = False

    def write(self, calls: Calls) -> str:
        written = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        return f"[{', '.join(written)}]"

    def is_cut_call(self, text: str, answer: Answer) -> bool:
        return "<|python_start|>" in text and text.startswith(answer.content)

    def test_no_object_as_arguments_is_content(self) -> None:
        for text in ("[f(1)]", "[f(x)]", "[f(a=x)]", "[1, 2]", "[f]", "[f(a==1)]", "[link](https://example.com)"):
            assert self.read(text).order == [text]

    def test_markers_of_llama_4_do_not_show(self) -> None:
        assert self.read("Well. <|python_start|>[now()]<|python_end|> So.").order == ["Well. ", 0, " So."]
        assert self.read("<|python_start|>print(1)<|python_end|>").order == ["<|python_start|>print(1)<|python_end|>"]

    @pytest.mark.parametrize(
        "written",
        [
            "1_000", "0x1f", "007.5", ".5", "5.", "+3", "-2e3", "'it\\'s'", '"a\\x41\\u00e9\\U0001f600\\101\\n\\d"',
            "'''two\nli'nes'''", "{'a': [True, None,], 'b': {}}", "[[], [1, ], {}]", "''", '"\\ud83d\\ude00"',
        ],
    )  # fmt: skip
    def test_literals_have_the_values_that_python_gives_them(self, written: str) -> None:
        with warnings.catch_warnings(action="ignore"):  # of an unknown escape
            expected = ast.literal_eval(written)
        if "ud83d" in written:
            expected = "\U0001f600"  # as JSON joins the halves
        assert json.loads(self.read(*f"[f(a={written})]").calls[0].arguments) == {"a": expected}

    def test_broken_call_gives_what_came(self) -> None:
        for end in ("oops", "1 + 2)]", "", "nan)]", "1e999)]", "'\\xzz')]", "(1, 2))]"):
            call = self.read(f"[f(a='x', b={end}").calls[0]
            assert call.arguments.startswith('{"a": "x"')

    def test_schema_with_joined_members_is_refused_in_words(self) -> None:
        tool = Tool("f", parameters={"type": "object", "anyOf": [{"required": ["a"]}]})
        with pytest.raises(InvalidRequestError, match="cannot force an object with anyOf"):
            self.format.grammar([tool], parallel=False, token_ids={})


class TestKimiK2(ToolCallContract):
    name = "kimi_k2"

    def write(self, calls: Calls) -> str:
        blocks = (
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
            for number, (name, arguments) in enumerate(calls)
        )
        return "<|tool_calls_section_begin|>" + "".join(blocks) + "<|tool_calls_section_end|>"

    def test_no_object_as_arguments_is_content(self) -> None:
        text = "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>"
        assert self.read(text).order == [text]

    @pytest.mark.parametrize("written", ["functions.a.b:12", "functions.a.b:0 ", "a.b:3", "a.b", " functions.a.b"])
    def test_name_is_found_in_the_id(self, written: str) -> None:
        text = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        assert self.read(*text).calls == [Call("a.b", "{}")]


class TestOpenAI(ToolCallContract):
    name = "openai"
    num_walks = 40

    def write(self, calls: Calls) -> str:
        return "<|start|>assistant".join(self.call(name, json.dumps(arguments)) for name, arguments in calls)

    def call(self, name: str, arguments: str) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"

    def test_no_object_as_arguments_is_content(self) -> None:
        for arguments in ("[1]", '"x"', "print(1)", "<b>"):
            text = f"{self.call('f', arguments)}<|start|>assistant"
            assert self.read(*text).order == [text.removesuffix("<|start|>assistant")]

    @pytest.mark.parametrize(
        "header",
        [
            "<|channel|>commentary to=functions.f <|constrain|>json",
            "<|channel|>commentary to=functions.f<|constrain|>json",
            "<|channel|>commentary to=functions.f json",
            "<|channel|>commentary to=functions.f",
            "<|channel|>analysis to=functions.f code",
            "<|channel|>commentary to=f <|constrain|>json",
            " to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f<|channel|>commentary json",
            "to=functions.f<|channel|>commentary",
            "<|start|>assistant to=functions.f<|channel|>commentary json",
        ],
    )
    def test_headers_of_all_kinds(self, header: str) -> None:
        for text in (f'{header}<|message|>{{"a": 1}}<|call|>', f'{header}<|message|>\n{{"a": 1}}'):
            assert self.read(*text).calls == [Call("f", '{"a": 1}')]
            assert self.read(*text).content == ""
        assert self.read(*f"{header}<|message|><|call|>").calls == [Call("f", "{}")]
        assert self.read(*f"{header}<|message|>").calls == [Call("f", "")]

    @pytest.mark.parametrize(
        "text",
        [
            "<|channel|>final<|message|>Well.",
            "<|channel|>commentary<|message|>Well.<|end|>",
            "<|channel|>commentary to=assistant<|message|>{}<|end|>",
            "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>",
            "<|start|>user to=functions.f<|message|>{}<|end|>",
            "<|channel|>commentary to=functions.f<|channel|>commentary<|message|>{}",
            f"<|channel|>commentary to=functions.f {'x' * 300}<|message|>{{}}",
            "to=5",
            "Use <|channel|> to name a channel. That is all.",
            "<|start|>, as you know",
            "<|channel|>finalThe answer is 4.",
            "Well to=functions.f<|message|>{}",
        ],
    )
    def test_messages_to_no_tool_are_content(self, text: str) -> None:
        assert self.read(*text).order == [text]

    def test_text_behind_an_empty_call_is_kept(self) -> None:
        for arguments in ("", "{}"):
            text = f"{self.call('f', arguments)}<|start|>assistant<|channel|>final<|message|>Done."
            assert self.read(*text).calls == [Call("f", "{}")]
            assert self.read(*text).content == "<|start|>assistant<|channel|>final<|message|>Done."

    def test_call_that_is_cut_in_its_header_is_dropped(self) -> None:
        for call in (self.call("f", ""), " to=functions.f<|channel|>commentary <|constrain|>json<|message|>"):
            header = call[: call.index("<|message|>")]
            for length in range(len("<|channel|>"), len(header) + 1):
                if "<" not in header[:length].rpartition("|>")[2]:
                    assert self.read(*header[:length]).order == [], header[:length]

    def test_forced_call_may_have_the_recipient_before_the_channel(self) -> None:
        tokenizer = byte_tokenizer(self.format.markers)
        ids = token_ids(tokenizer, self.format.markers)
        grammar = self.format.grammar(TOOLS, parallel=True, token_ids=ids)
        for call in (" to=functions.now<|channel|>commentary json<|message|>{}", self.call("now", "{}")[:-8]):
            for text in (call, f"{call}<|call|>", f"{call}<|call|><|start|>assistant{call}"):
                assert accepts(grammar, tokenizer, text)
        assert not accepts(grammar, tokenizer, " to=now<|channel|>commentary json<|message|>{}")


class TestGranite(ToolCallContract):
    name = "granite"
    begin, end = "<|tool_call|>", ""

    def write(self, calls: Calls) -> str:
        listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{self.begin}{json.dumps(listed)}{self.end}"

    def test_no_object_as_arguments_is_content(self) -> None:
        for text in (f'{self.begin}[{{"name": "f", "arguments": "x"}}]', f"{self.begin}[1]", f"{self.begin} so"):
            assert self.read(text).order == [text]

    def test_object_without_a_list_is_a_call(self) -> None:
        call = '{"arguments": {"a": 1}, "name": "f"}'
        answer = self.read(f"Well.{self.begin} {call}{self.end} So. {self.begin}\n[{call}, {call}]{self.end}")
        assert answer.order == ["Well.", 0, " So. ", 1, 2]
        assert answer.calls[2] == Call("f", '{"a": 1}')

    def test_text_behind_a_broken_list_is_read_on(self) -> None:
        answer = self.read(
            *f'{self.begin}[{{"name": "f", "arguments": {{"a": 1{self.begin}', self.write(SOME[:1])[len(self.begin) :]
        )
        assert [call.name for call in answer.calls] == ["f", "get_weather"]


class TestNemotronJson(TestGranite):
    name = "nemotron_json"
    begin, end = "<TOOLCALL>", "</TOOLCALL>"


class TestQwen3Coder(ToolCallContract):
    """What holds for all formats with bare values. Strings that look like something else are written with quotes, as
    most tools here are not known.
    """

    name = "qwen3_coder"
    between = "\n"  # calls

    def write(self, calls: Calls) -> str:
        return self.between.join(f"<tool_call>\n{self.call(*call)}\n</tool_call>" for call in calls)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(self.pair(key, self.value(value)) for key, value in arguments.items())
        return f"<function={name}>\n{pairs}</function>"

    def pair(self, key: str, text: str) -> str:
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    @property
    def value_end(self) -> str:
        return self.pair("a", "x").rpartition("x")[2].strip()

    def value(self, value: Any) -> str:
        """A string as it is, unless it looks like something else."""
        written = json.dumps(value, ensure_ascii=False)
        is_plain = isinstance(value, str) and typed(value, KINDS) == written and self.value_end not in value
        return str(value) if is_plain else written

    def arguments(self, parameters: Any, *texts: str) -> Any:
        """The arguments `a`, `b` and so on that a tool with parameters `a`, `b` and so on is called with."""
        tool = Tool("typed", parameters={"properties": dict(zip("abcdefghij", parameters, strict=False))})
        call = "".join(self.pair(key, text) for key, text in zip("abcdefghij", texts, strict=False))
        text = self.write([("typed", {"only": 1})]).replace(self.pair("only", "1"), call)
        whole = parsed(self.format.parser([tool]), [text])
        assert parsed(self.format.parser([tool]), text) == whole
        return json.loads(whole.calls[0].arguments)

    def test_no_object_as_arguments_is_content(self) -> None:
        begin, end = self.format.markers[:2]
        for inside in ("[1]", '{"name": "f", "arguments": {}}', "f [1]", "<function>f</function>", ""):
            text = f"Well. {begin}{inside}{end} So."
            assert self.read(*text).order == [text]

    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            ({"type": "string"}, "5", "5"),
            ({"type": "string"}, "null", "null"),
            ({"type": "string"}, "", ""),
            ({"type": "string"}, '\n "a"\n\t\\n \n', '\n "a"\n\t\\n \n'),
            ({"enum": ["5", "x"]}, "5", "5"),
            ({"$ref": "#/properties/a"}, "5", 5),
            ({"type": "integer"}, "-42", -42),
            ({"type": "integer"}, "4.5", "4.5"),
            ({"type": "integer"}, "five", "five"),
            ({"type": "integer"}, "null", None),
            ({"type": "number"}, "3", 3),
            ({"type": "number"}, "3.14", 3.14),
            ({"type": "float"}, "3.14", 3.14),
            ({"type": "boolean"}, "true", True),
            ({"type": "boolean"}, "False", False),
            ({"type": "boolean"}, "yes", "yes"),
            ({"type": "object"}, '{"width": 10, \n "height": [20]}', {"width": 10, "height": [20]}),
            ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
            ({"type": "object"}, '{"a": 1', '{"a": 1'),
            ({"type": "array"}, '["a", 1]', ["a", 1]),
            ({"type": "array"}, "a, b", "a, b"),
            ({"type": ["string", "null"]}, "null", None),
            ({"type": ["string", "null"]}, "nullable", "nullable"),
            ({"type": ["string", "null"]}, '"x"', '"x"'),
            ({"type": ["string", "null"]}, "5", "5"),
            ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
            ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, "some text", "some text"),
            ({"anyOf": [{"type": "object"}, {"type": "null"}]}, '{"theme": "dark"}', {"theme": "dark"}),
            ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "5", "5"),
            ({}, "5", 5),
            ({}, '"5"', "5"),
            ({}, "  5 apples", "  5 apples"),
            ({}, "[1, 2", "[1, 2"),
        ],
    )
    def test_value_has_the_type_that_the_schema_gives_it(self, schema: Any, text: str, value: Any) -> None:
        found = self.arguments([{"type": "integer"}, schema], "1", text)["b"]
        assert (found, type(found)) == (value, type(value))

    def test_tag_within_a_text_is_text(self) -> None:
        text = f"if x < 1: {self.value_end} {self.value_end}\nso {self.value_end[:-1]}"
        assert self.arguments([{"type": "string"}] * 2, text, "b") == {"a": text, "b": "b"}
        assert self.arguments([{}], text) == {"a": text}

    def test_long_text_comes_as_it_is_written(self) -> None:
        text = self.write([("f", {"a": "w" + "x" * 300 + ' "y"\n' * 100})])
        parser = self.format.parser([Tool("f", parameters={"properties": {"a": {"type": "string"}}})])
        num_pieces = sum(bool(parser.feed(letter)) for letter in text)
        assert num_pieces > 700

    def test_schemas_of_any_kind_raise_nothing(self) -> None:
        odd = [
            {"type": [{}]},
            {"type": 3},
            {"anyOf": {}},
            {"anyOf": 3},
            {"enum": "x"},
            {"$ref": 3},
            {"allOf": {}},
            None,
            "x",
        ]
        loop = {"anyOf": [{"$ref": "#/properties/a"}]}
        assert self.arguments([loop, *odd], "x", *("5" for _ in odd))["a"] == "x"
        tool = Tool("f", parameters={"properties": []})
        assert parsed(self.format.parser([tool]), self.write([("f", {"a": 1})])).calls == [Call("f", '{"a": 1}')]

    def test_texts_and_other_values_that_are_forced_are_read_alike(self) -> None:
        tree = {
            "type": "object",
            "properties": {
                "name": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 20}, {"type": "null"}]},
                "text": {"type": "string", "minLength": 1, "maxLength": 30},
                "kind": {"anyOf": [{"const": 1}, {"enum": ["a", "", None]}, {"$ref": "#/$defs/more"}]},
                "any": {"description": "Anything at all.", "maxLength": 3},
                "below": {"type": ["array", "null"], "items": {"$ref": "#/$defs/more"}, "maxItems": 2},
            },
            "required": ["name", "text", "kind", "below"],
            "$defs": {"more": {"enum": ["more", True]}},
        }
        for kind in ((), self.format.markers):
            for text in walks(self.format, [Tool("f", parameters=tree)], byte_tokenizer(kind), 30, parallel=False):
                answer = parsed(self.format.parser([Tool("f", parameters=tree)]), text)
                jsonschema.validate(json.loads(answer.calls[0].arguments), tree)

    def test_forced_text_may_hold_code(self) -> None:
        tool = Tool("f", parameters={"properties": {"a": {"type": "string"}}, "required": ["a"]})
        for kind in ((), self.format.markers):
            tokenizer = byte_tokenizer(kind)
            grammar = self.format.grammar([tool], parallel=False, token_ids=token_ids(tokenizer, self.format.markers))
            for text in ("", "<p>\n\n</p>", f"</{self.value_end}"[: len(self.value_end)], '"\\'):
                assert accepts(grammar, tokenizer, self.write([("f", {"a": text})])), text
            assert not accepts(grammar, tokenizer, self.write([("f", {"a": 3})]).replace("3", f"x{self.value_end}y"))

    @pytest.mark.parametrize(
        ("schema", "words"),
        [
            ({"type": "string", "pattern": "x"}, "pattern"),
            ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf"),
            ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, "another kind with limits"),
            ({"type": "string", "anyOf": [{"const": "a"}]}, "both type and anyOf"),
            ({"enum": ["1", 2]}, "cannot force the text '1'"),
            ({"enum": ["x</parameter></arg_value>"]}, "the text"),
        ],
    )
    def test_schema_that_cannot_be_forced_is_refused_in_words(self, schema: Any, words: str) -> None:
        tool = Tool("f", parameters={"properties": {"a": schema}})
        with pytest.raises(InvalidRequestError, match=words):
            self.format.grammar([tool], parallel=False, token_ids={})
        for name in ("a>b", " a", "", "a\nb"):
            with pytest.raises(InvalidRequestError, match="cannot be the name of a parameter"):
                self.format.grammar([Tool("f", parameters={"required": [name]})], parallel=False, token_ids={})

    @pytest.mark.parametrize("least", [0, 40])
    @pytest.mark.parametrize("are_tokens", [False, True])
    def test_forced_text_cannot_spell_the_tag_that_ends_it(self, are_tokens: bool, least: int) -> None:
        tool = Tool("f", parameters={"properties": {"a": {"type": "string", "minLength": least}}, "required": ["a"]})
        tokenizer = byte_tokenizer(self.format.markers if are_tokens else ())
        grammar = self.format.grammar([tool], parallel=False, token_ids=token_ids(tokenizer, self.format.markers))
        own = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
        matcher = LLMatcher(own, LLMatcher.grammar_from_lark(grammar))
        begun = tokenizer.encode(self.write([("f", {"a": "zz"})]).partition("zz")[0] + "zz").ids
        assert matcher.try_consume_tokens(begun) == len(begun)
        spelled = [number for letter in f"{self.value_end}q" for number in tokenizer.encode(letter).ids]
        assert matcher.try_consume_tokens(spelled) < len(spelled)

    def test_text_behind_calls_is_content(self) -> None:
        assert self.read(*f"{self.write(SOME)} So.").order == [0, 1, 2, " So."]

    def test_broken_call_gives_what_came_and_the_next_is_read(self) -> None:
        broken = self.write([("f", {"a": "x"})]).replace(self.pair("a", "x"), f"{self.pair('a', 'x').rstrip()}<oops>")
        text = f"{broken}\n{self.write(SOME[:1])}"
        assert self.read(*text).calls[0] == Call("f", self.read(text).calls[0].arguments)


class TestBareQwenCalls:
    """Qwen3-Coder forgets the marker before a call."""

    form = TestQwen3Coder()
    call = "<function=now>\n</function>"

    def test_call_of_a_known_tool_needs_no_marker(self) -> None:
        assert self.form.read(*f"Well. {self.call}\n</tool_call>\n").order == ["Well. ", 0]
        assert self.form.read(*f"{self.call} and so on").order == [0, " and so on"]
        assert self.form.read(*f"{self.call}{self.call}</tool_call>{self.call}").order == [0, 1, 2]

    def test_what_looks_like_one_is_text(self) -> None:
        for text in ("Write <function=nobody></function> here.", "<function=now", "<function=", "a <function=now x>"):
            assert self.form.read(*text).order == [text]

    def test_several_calls_may_stand_between_the_markers(self) -> None:
        assert self.form.read(*f"<tool_call>{self.call}\n<function=f></function></tool_call> So.").order == [
            0,
            1,
            " So.",
        ]


class TestGlm45(TestQwen3Coder):
    name = "glm45"
    newline = "\n"

    def write(self, calls: Calls) -> str:
        return self.newline.join(f"<tool_call>{self.call(*call)}</tool_call>" for call in calls)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(self.pair(key, self.value(value)) for key, value in arguments.items())
        return f"{name}{self.newline}{pairs}"

    def pair(self, key: str, text: str) -> str:
        return f"<arg_key>{key}</arg_key>{self.newline}<arg_value>{text}</arg_value>{self.newline}"

    def test_call_without_line_breaks_is_the_same(self) -> None:
        compact = TestGlm45()
        compact.newline = ""
        assert self.read(*compact.write(SOME)).calls == self.read(self.write(SOME)).calls
        assert self.read("<tool_call>now</tool_call>").calls == [Call("now", "{}")]
        compact.test_grammar_allows_what_models_write()


class TestMiniMaxM2(TestQwen3Coder):
    name = "minimax_m2"

    def write(self, calls: Calls) -> str:
        inside = "\n".join(self.call(*call) for call in calls)
        return f"<minimax:tool_call>\n{inside}\n</minimax:tool_call>"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(self.pair(key, self.value(value)) for key, value in arguments.items())
        return f'<invoke name="{name}">\n{pairs}</invoke>'

    def pair(self, key: str, text: str) -> str:
        return f'<parameter name="{key}">{text}</parameter>\n'


CONTRACTS = [
    *ToolCallContract.__subclasses__(),
    *(form for base in ToolCallContract.__subclasses__() for form in base.__subclasses__()),
]


def test_every_format_has_its_contract() -> None:
    classes = {form.name for form in CONTRACTS}
    assert classes == set(names_in("text/tool_calls"))


@pytest.mark.parametrize("contract", CONTRACTS)
@settings(max_examples=by_tier(6, 400))
@given(calls=CALLS)
def test_reads_what_models_write(contract: type[ToolCallContract], calls: Calls) -> None:
    form = contract()
    answer = form.read(form.write(calls))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ""


@pytest.mark.parametrize("contract", CONTRACTS)
@settings(max_examples=by_tier(6, 400))
@given(data=st.data(), cuts=CUTS)
def test_cuts_change_nothing(contract: type[ToolCallContract], data: st.DataObject, cuts: list[int]) -> None:
    form = contract()
    text = "".join(data.draw(st.lists(st.sampled_from(form.fragments()) | TEXTS, max_size=12)))
    whole = form.read(text)
    assert form.read(*pieces_of(text, cuts)) == whole
    assert form.read(*text) == whole


@pytest.mark.parametrize("contract", CONTRACTS)
def test_calls_in_other_formats_raise_nothing_and_are_read_alike_however_cut(contract: type[ToolCallContract]) -> None:
    form = contract()
    for other in CONTRACTS:
        text = f"{other().write(SOME)}\n{form.write(SOME[:1])}"
        answer = form.read(text)
        assert form.read(*text) == answer
        assert answer.calls or answer.content == text, other


@pytest.mark.parametrize("contract", CONTRACTS)
@settings(max_examples=by_tier(6, 400))
@given(data=st.data())
def test_text_without_a_call_comes_out_as_it_is(contract: type[ToolCallContract], data: st.DataObject) -> None:
    form = contract()
    text = "".join(data.draw(st.lists(st.sampled_from(form.fragments()) | TEXTS, max_size=8)))
    answer = form.read(text)
    assert answer.calls or answer.content == text or form.is_cut_call(text, answer)
