"""llguidance over the served tokenizer: what may come, what must come, when it is over, what is remembered."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import CapacityError, InternalError, InvalidRequestError, NotReadyError
from lora_serve.core.request import TokenGrammar
from lora_serve.engine.warmup import ANY_TEXT
from lora_serve.text.grammars import matcher
from lora_serve.text.grammars.matcher import GrammarConstraint
from lora_serve.text.tokenizer import TextModel
from tests.text.grammars.bench import DEMO, EOS, Bench, regex

SCHEMA = {
    "type": "object",
    "properties": {"customer_number": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["new"]}},
    "required": ["customer_number", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(str(DEMO))


@pytest.fixture
def bench(text: TextModel) -> Iterator[Bench]:
    bench = Bench(lambda: text, 2048)
    yield bench
    bench.constraints.close()


def write(bench: Bench, constraint: GrammarConstraint, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert token in bench.allowed(constraint)
        constraint.advance([token])


def test_only_tokens_that_can_go_on_may_come(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(regex("(hello|help) [0-9]{2}"))
    for token in bench.allowed(constraint):
        spelled = text.token_bytes(token).decode()
        assert "hello".startswith(spelled) or "help".startswith(spelled), spelled
    constraint.advance(text.encode("help ", add_special_tokens=False))
    assert {text.token_bytes(token) for token in bench.allowed(constraint)} >= {b"0", b"9"}
    assert not set(bench.allowed(constraint)) & set(EOS)


def test_answer_written_token_by_token_obeys_its_schema(bench: Bench, text: TextModel) -> None:
    """With the last token that may come each time, and with tokens that the grammar forces."""
    constraint = bench.compiled(LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}))
    tokens: list[int] = []
    num_forced = 0
    while not constraint.is_over:
        new = constraint.forced() or (bench.allowed(constraint)[-1],)
        num_forced += len(new) if len(new) > 1 else 0
        constraint.advance(new)
        tokens += new
    answer = json.loads(text.decode([token for token in tokens if token not in EOS]))
    assert answer["kind"] == "new"
    assert 0 <= answer["customer_number"] <= 99
    assert num_forced > 4


def test_forced_tokens_are_the_tokenizer_s_own_spelling(bench: Bench, text: TextModel) -> None:
    """Those a model that knows the answer would have written one by one."""
    constraint = bench.compiled(regex("yes: the quick brown fox jumps over it|no"))
    spelled = text.encode("yes: the quick brown fox jumps over it", add_special_tokens=False)
    taken = 0
    while not constraint.is_over:
        forced = constraint.forced()
        assert forced == spelled[taken : taken + len(forced)]
        new = forced or (spelled[taken],)
        assert new[0] in bench.allowed(constraint)
        constraint.advance(new)
        taken += len(new)
    assert taken == len(spelled)


def test_end_may_come_where_the_text_is_complete(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(regex("ab*"))
    assert not set(EOS) & set(bench.allowed(constraint))
    constraint.advance(text.encode("ab", add_special_tokens=False))
    assert set(EOS) <= set(bench.allowed(constraint))
    assert not constraint.is_over
    constraint.advance([EOS[1]])
    assert constraint.is_over


def test_requests_do_not_share_their_state(bench: Bench, text: TextModel) -> None:
    first, second = bench.compiled(regex("[ab]{2}")), bench.compiled(regex("[ab]{2}"))
    first.advance(text.encode("ab", add_special_tokens=False))
    assert first.is_over
    assert not second.is_over
    assert bench.allowed(second)


def test_tokens_after_each_guess_are_those_that_come_once_it_was_right(bench: Bench, text: TextModel) -> None:
    """Those of a schema's string, up to a guess that ends it, after which the schema leaves no choice."""
    grammar = LLMatcher.grammar_from_json_schema({"properties": {"kind": {}, "n": {"type": "integer"}}})
    constraint, other = bench.compiled(grammar), bench.compiled(grammar)
    start = text.encode('{"kind": "', add_special_tokens=False)
    guess = text.encode("refund me", add_special_tokens=False)
    for one in (constraint, other):
        one.advance(start)
    after = constraint.after(guess)
    assert len(after) == len(guess) > 2
    bench.constraints.start([constraint, *after])
    assert constraint.wait()
    for token, guessed in zip(guess, after, strict=True):
        other.advance([token])
        bench.constraints.start([other])
        assert guessed.wait() == other.wait()
    constraint.advance(text.encode("no", add_special_tokens=False))  # the guess was wrong
    assert not constraint.is_over


@pytest.mark.parametrize(
    ("guess", "num_allowed"),
    [("help 12", len("hel")), ("hex", len("he")), ("wrong", 0), ("", 0)],
    ids=["rest is forced", "not allowed", "not at all", "nothing"],
)
def test_guesses_end_before_one_that_leaves_nothing_to_guess(
    bench: Bench, text: TextModel, guess: str, num_allowed: int
) -> None:
    constraint = bench.compiled(regex("(hello|help) [0-9]{2}"))
    tokens = [token for letter in guess for token in text.encode(letter, add_special_tokens=False)]
    assert len(constraint.after(tokens)) == num_allowed
    assert not constraint.is_over
    assert bench.allowed(constraint)


def test_guess_that_completes_the_answer_is_left_to_the_row(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(regex("[ab]{3}"))
    tokens = [token for letter in "aba" for token in text.encode(letter, add_special_tokens=False)]
    assert len(constraint.after(tokens)) == 2
    constraint.advance(tokens)
    assert constraint.is_over


def test_nothing_is_guessed_while_masks_are_slow(
    bench: Bench, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = bench.compiled(regex("[ab]{30}"))
    tokens = text.encode("abba", add_special_tokens=False)
    assert constraint.after(tokens)
    monkeypatch.setattr(matcher, "MASK_SECONDS", 0.0)
    assert bench.allowed(constraint)
    assert not constraint.after(tokens)


def test_masks_of_a_step_belong_to_their_rows(bench: Bench) -> None:
    added = tuple(AddedToken(2048 + i, f"<tool{i}>", is_special=True) for i in range(40))
    grammars = [TokenGrammar(regex("x+")), TokenGrammar(regex("y+"), added), TokenGrammar(regex("z+"))]
    rows = [bench.compiled(grammar) for grammar in grammars]
    bench.constraints.start(rows)
    assert len({row.wait() for row in rows}) == 3
    assert [len(row.wait()) for row in rows] == [256, 264, 256]
    before = bench.constraints.stats().num_masks
    bench.constraints.start(rows)
    assert bench.constraints.stats().num_masks == before, "a row that runs again has its mask already"


def test_added_tokens_are_known_to_their_own_vocabulary_alone(bench: Bench) -> None:
    added = (AddedToken(2048, "<tool>", is_special=True), AddedToken(2049, "servus"))
    lark: str = LLMatcher.grammar_from_lark('start: <[2048]> "x"')
    own = bench.compiled(TokenGrammar(lark, added))
    assert bench.allowed(own) == [2048]
    assert isinstance(bench.ended(lark).error, InvalidRequestError)
    word = bench.compiled(TokenGrammar(regex("servus"), added))
    assert 2049 in bench.allowed(word)


def test_compiled_grammar_is_remembered_by_tenant(bench: Bench) -> None:
    for tenant in ("acme", "acme", "pulse"):
        bench.compiled(regex("a"), tenant)
    assert bench.constraints.stats().num_compiled == 2


def test_oldest_grammar_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_COMPILED", 2)
    for letter in "abaca":
        bench.compiled(regex(letter))
    assert bench.constraints.stats().num_compiled == 3  # `a` was used again each time
    bench.compiled(regex("b"))
    assert bench.constraints.stats().num_compiled == 4


def test_compilation_is_not_used_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what all of its copies learn."""
    monkeypatch.setattr(matcher, "MAX_USES", 3)
    for _ in range(7):
        bench.compiled(regex("a"))
    assert bench.constraints.stats().num_compiled == 3


@pytest.mark.parametrize("grammar", ["what", "{}", regex("[a"), '{"grammars": [{"json_schema": {"type": "nothing"}}]}'])
def test_bad_grammar_is_refused_in_one_line(bench: Bench, grammar: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = bench.ended(grammar).error
    assert isinstance(error, InvalidRequestError)
    assert re.fullmatch(r"The grammar cannot be used: .+", str(error))
    assert capfd.readouterr() == ("", "")


def test_limits_hold_while_compiling_and_while_answering(text: TextModel) -> None:
    bench = Bench(lambda: text, 2048, max_grammar_items=1000, max_lexer_work=10_000)
    big = json.dumps({"enum": [f"{i:05d}" * 20 for i in range(2000)]})
    assert isinstance(bench.ended(LLMatcher.grammar_from_json_schema(big)).error, InvalidRequestError)
    constraint = bench.compiled(LLMatcher.grammar_from_lark('start: x{1,400}\nx: "a" | "a" "a" | "a" "a" "a"'))
    letter = text.encode("a", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match=r"cannot be held to the grammar any further: .*Too many items"):
        write(bench, constraint, letter * 400)
    bench.constraints.close()


def test_row_whose_masks_take_too_long_ends_and_those_beside_it_do_not(
    bench: Bench, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long way to the next choice: every mask looks at all of it."""
    long_text = LLMatcher.grammar_from_json_schema({"anyOf": [{"const": 1}, {"const": "abcdefgh" * 10_000}]})
    slow, quick = bench.compiled(long_text), bench.compiled(regex('"[ab]{9}'))
    monkeypatch.setattr(matcher, "MASK_SECONDS", 0.01)
    rows = [slow, quick]
    for row in rows:
        row.advance(text.encode('"', add_special_tokens=False))
    bench.constraints.start(rows)
    assert all(row.wait() for row in rows)
    letter = text.encode("a", add_special_tokens=False)
    for row in rows:
        row.advance(letter)
    bench.constraints.start(rows)
    assert set(letter) <= set(bench.allowed(quick))
    with pytest.raises(InvalidRequestError, match="takes too long"):
        slow.wait()


def test_grammar_whose_first_mask_takes_too_long_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MASK_SECONDS", 0.01)
    error = bench.ended(LLMatcher.grammar_from_json_schema({"const": "abcdefgh" * 10_000})).error
    assert isinstance(error, InvalidRequestError)
    assert "takes too long" in str(error)


def test_token_that_may_not_come_is_an_error_in_words(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(regex("a"))
    with pytest.raises(InvalidRequestError, match="cannot be held to the grammar"):
        constraint.advance(text.encode("b", add_special_tokens=False))


def test_warm_up_s_grammar_lets_any_text_come(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(ANY_TEXT)
    for part in ("Grüße,\n{", " <|end", "x"):
        write(bench, constraint, text.encode(part, add_special_tokens=False))
    assert set(EOS) <= set(bench.allowed(constraint))


def test_vocabulary_is_built_once_and_before_it_is_needed(text: TextModel) -> None:
    loads: list[str] = []

    def load() -> TextModel:
        loads.append(threading.current_thread().name)
        return text

    bench = Bench(load, 2048)
    bench.constraints.prepare()
    for letter in "abc":
        bench.compiled(regex(letter))
    assert len(loads) == 1
    assert loads[0].startswith("grammar")
    bench.constraints.close()


def test_tokenizer_that_cannot_be_read_ends_its_requests_in_words() -> None:
    def load() -> TextModel:
        raise OSError("the disk is gone")

    bench = Bench(load, 2048)
    bench.constraints.prepare()
    for _ in range(2):
        error = bench.ended(regex("a")).error
        assert isinstance(error, InternalError)
        assert "disk" not in str(error)
    bench.constraints.close()


@contextmanager
def no_threads() -> Iterator[None]:
    """The system gives the process no further thread."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_grammar_for_which_there_is_no_thread_is_refused_and_compiled_later(bench: Bench) -> None:
    with no_threads():
        for _ in range(2):
            error = bench.ended(regex("ab")).error
            assert isinstance(error, CapacityError)
            assert not isinstance(error, NotReadyError), "the engine does not end"
            assert "thread" in str(error)
    assert bench.allowed(bench.compiled(regex("ab")))


def test_rows_for_whose_masks_there_is_no_thread_are_refused_and_others_have_theirs_later(bench: Bench) -> None:
    rows = [bench.compiled(regex("[ab]{2}")), bench.compiled(regex("[cd]{2}"))]
    with no_threads():
        bench.constraints.start(rows)
    for row in rows:
        with pytest.raises(CapacityError) as refused:
            row.wait()
        assert not isinstance(refused.value, NotReadyError)
    assert bench.allowed(bench.compiled(regex("[ab]{2}")))


def test_tokenizer_of_a_kind_that_the_library_does_not_know_is_spelled_out() -> None:
    """A word for each token and no decoder, as models of random weights have."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    text = TextModel(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>"))
    bench = Bench(lambda: text, 8, eos=(2,))
    constraint = bench.compiled(regex(" a b"))
    assert bench.allowed(constraint) == [3]
    constraint.advance([3, 4])
    assert constraint.is_over
    bench.constraints.close()
