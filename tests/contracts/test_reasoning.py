"""What every format of reasoning must do; each format inherits the class."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.setting_types import names_in
from lora_serve.text.reasoning import reasoning_format
from lora_serve.text.reasoning.base import ReasoningFormat, ReasoningText
from tests.attempts import in_some_attempt
from tests.text.tool_calls.calls import pieces_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CUTS = st.lists(st.integers(0, 10**6), max_size=12)


class ReasoningContract(ABC):
    name: str

    @abstractmethod
    def write(self, reasoning: str) -> str:
        """Reasoning as models of this format write it, with its markers."""

    @property
    @abstractmethod
    def close(self) -> str:
        """The marker that ends reasoning."""

    @property
    def format(self) -> ReasoningFormat:
        return reasoning_format(self.name)

    def read(self, *pieces: str, starts_inside: bool = False) -> tuple[str, str]:
        """Reasoning and content; the reasoning comes first."""
        parser = self.format.parser(starts_inside)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert all(event.text for event in events)
        kinds = [isinstance(event, ReasoningText) for event in events]
        assert kinds == sorted(kinds, reverse=True)
        texts = [
            "".join(event.text for event in events if isinstance(event, ReasoningText) is kind)
            for kind in (True, False)
        ]
        return texts[0], texts[1]

    def fragments(self) -> list[str]:
        whole = self.write("some reasoning\n")
        return [whole, self.close, whole[: len(whole) // 3], self.close[:3], "\n", "<", "[", "Here", " ", "x"]

    def test_is_the_file_of_its_name(self) -> None:
        assert type(self.format).__module__.endswith(f".reasoning.{self.name}")

    def test_reasoning_and_content_are_told_apart(self) -> None:
        assert self.read(self.write("so\n{so} "), "\n\nAn answer. ") == ("so\n{so} ", "\n\nAn answer. ")
        assert self.read("\n", self.write("so"), "x") == ("so", "x")

    def test_template_may_have_begun_it(self) -> None:
        assert self.read("so", self.close, "x", starts_inside=True) == ("so", "x")
        assert self.read("\n so", starts_inside=True) == ("\n so", "")
        assert self.read(self.write("so") + "x", starts_inside=True) == ("so", "x")

    def test_beginning_is_seen_in_the_prompt(self) -> None:
        begun = self.write("")[: -len(self.close)]
        assert self.format.is_open_after(f"user: why?\nassistant: {begun}\n")
        assert not self.format.is_open_after(f"user: why {begun}?\nassistant: ")
        assert not self.format.is_open_after(f"user: why?\nassistant: {begun}{self.close}\n")

    def test_answer_that_does_not_begin_with_it_is_content(self) -> None:
        text = f"Well, {self.write('no')} and {self.close}"
        assert self.read(text) == ("", text)

    def test_reasoning_that_is_cut_is_reasoning(self) -> None:
        text = self.write("so it goes")[: -len(self.close)]
        for length in range(len(self.close)):
            assert self.read(text + self.close[:length]) == ("so it goes" + self.close[:length], "")

    def test_text_is_held_back_no_longer_than_a_marker(self) -> None:
        longest = len(self.write(""))
        for text in (self.write("a < b [c] Here it is " * 9), "a < b [c] Here it is " * 9):
            parser, num_out = self.format.parser(starts_inside=False), 0
            for number, character in enumerate(text, 1):
                num_out += sum(len(event.text) for event in parser.feed(character))
                assert number - num_out <= longest

    def test_time_is_linear_in_single_characters(self) -> None:
        def seconds(size: int) -> float:
            text = self.write("".join(self.fragments()[2:]) * size)[:size] + self.close + "x" * size
            parser, started = self.format.parser(starts_inside=False), time.process_time()
            for character in text:
                parser.feed(character)
            parser.finish()
            return time.process_time() - started

        def is_linear() -> None:
            small = min(seconds(2_000) for _ in range(3))
            assert seconds(20_000) < 30 * small + 0.05, "ten times the text takes a hundred times as long"

        in_some_attempt(is_linear)


class TestDeepSeekR1(ReasoningContract):
    name = "deepseek_r1"
    close = "</think>"

    def write(self, reasoning: str) -> str:
        return f"<think>{reasoning}</think>"

    def test_other_names_are_the_same_format(self) -> None:
        assert type(reasoning_format("qwen3")) is type(reasoning_format("deepseek_r1"))


class TestMistral(ReasoningContract):
    name = "mistral"
    close = "[/THINK]"

    def write(self, reasoning: str) -> str:
        return f"[THINK]{reasoning}[/THINK]"


class TestGemma4(ReasoningContract):
    name = "gemma4"
    close = "<channel|>"

    def write(self, reasoning: str) -> str:
        return f"<|channel>thought\n{reasoning}<channel|>"


class TestGranite(ReasoningContract):
    name = "granite"
    close = "Here is my response:"

    def write(self, reasoning: str) -> str:
        return f"Here is my thought process:{reasoning}Here is my response:"

    def test_short_form(self) -> None:
        assert self.read("Here's my thought process: a Here's my response: b") == (" a ", " b")


class TestGptOss(ReasoningContract):
    name = "openai_gptoss"
    close = "<|end|><|start|>assistant<|channel|>final<|message|>"

    def write(self, reasoning: str) -> str:
        return f"<|channel|>analysis<|message|>{reasoning}{self.close}"

    def test_answer_without_reasoning(self) -> None:
        assert self.read("<|channel|>final<|message|>Well.") == ("", "Well.")
        assert self.read(*"<|channel|>final <|constrain|>json<|message|>{}<|end|>") == ("", "{}")

    def test_reasoning_that_is_cut_is_reasoning(self) -> None:
        """A header that is cut is dropped."""
        text = self.write("so it goes")[: -len(self.close)]
        for length in range(len(self.close)):
            cut = self.close[:length]
            is_header = cut.startswith("<|end|>") and "<" not in cut.rpartition("|>")[2]
            assert self.read(text + cut) == ("so it goes" if is_header else f"so it goes{cut}", "")

    def test_text_about_markers_is_text(self) -> None:
        for text in (
            "Use <|channel|> to name a channel. That is all.",
            "<|start|>, as you know",
            "a <|channel|>finally",
        ):
            assert self.read(*f"<|channel|>final<|message|>{text}") == ("", text)
        cut = "<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>The answer is 4."
        assert self.read(*cut) == ("", "<|channel|>finalThe answer is 4.")

    def test_messages_of_one_kind_are_lines(self) -> None:
        told, plan = "<|channel|>analysis<|message|>{}<|end|>", "<|channel|>commentary<|message|>{}<|end|>"
        messages = (told.format("One."), told.format("Two."), plan.format("A plan."), self.close[len("<|end|>") :])
        text = "<|start|>assistant".join(messages).replace("assistant<|start|>assistant", "assistant") + "Done."
        assert self.read(*text) == ("One.\nTwo.", "A plan.\nDone.")

    def test_message_to_a_tool_is_passed_on_as_it_is(self) -> None:
        call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        other = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        begun = "<|channel|>analysis<|message|>So."
        assert self.read(*f"{begun}<|end|>{call}{other}") == ("So.", call + other)
        assert self.read(*f"{begun}", *f"<|end|>{call[:-8]}") == ("So.", call[:-8])
        first = call.removeprefix("<|start|>assistant")
        assert self.read(*first) == ("", first)
        assert self.read(*other.removeprefix("<|start|>assistant")) == ("", other.removeprefix("<|start|>assistant"))

    def test_what_stands_for_a_header_and_is_none_is_text(self) -> None:
        for text in ("<|start|>user<|message|>Hm", " and so on", "<|start|>assistant<|start|>x"):
            assert self.read(*f"<|channel|>final<|message|>Well.<|end|>{text}") == ("", f"Well.<|end|>{text}")
        assert self.read(*"to=5") == ("", "to=5")
        assert self.read(*"<|channel|>fin") == ("", "")


def test_every_format_has_its_contract() -> None:
    assert {form.name for form in ReasoningContract.__subclasses__()} == set(names_in("text/reasoning"))


@pytest.mark.parametrize("contract", ReasoningContract.__subclasses__())
@given(data=st.data(), cuts=CUTS, starts_inside=st.booleans())
def test_cuts_change_nothing(
    contract: type[ReasoningContract], data: st.DataObject, cuts: list[int], starts_inside: bool
) -> None:
    form = contract()
    text = "".join(data.draw(st.lists(st.sampled_from(form.fragments()) | TEXTS, max_size=10)))
    whole = form.read(text, starts_inside=starts_inside)
    assert form.read(*pieces_of(text, cuts), starts_inside=starts_inside) == whole
    assert form.read(*text, starts_inside=starts_inside) == whole


@pytest.mark.parametrize("contract", ReasoningContract.__subclasses__())
@given(reasoning=TEXTS, content=TEXTS)
def test_nothing_is_lost(contract: type[ReasoningContract], reasoning: str, content: str) -> None:
    assert contract().read(contract().write(reasoning), content) == (reasoning, content)
