"""Bodies of inference requests beyond wrong types and ranges (tests/server/bodies/test_bad_input.py): bombs, tricks.

Each is a 4xx, or is answered as what it says on its face.
"""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from typing import Any

import pytest

from tests.canary.house import House
from tests.hostile.sending import assert_refused, assert_tells_nothing, post

OK = 200
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
HI = [{"role": "user", "content": "Hi"}]
NESTED: Any = functools.reduce(lambda inner, _: {"a": [inner]}, range(100), 1)

RAW: dict[str, tuple[bytes, int]] = {
    "many_brackets": (b"[" * 200_000 + b"]" * 200_000, 400),
    "deep_in_a_field": (b'{"prompt": "x", "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", 400),
    "deep_under_an_ignored_name": (b'{"prompt": "x", "junk": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "number_of_a_million_digits": (b'{"prompt": "x", "max_tokens": ' + b"1" * 1_000_000 + b"}", 400),
    "fraction_of_a_million_digits": (b'{"prompt": "x", "max_tokens": 1, "top_p": 0.' + b"1" * 1_000_000 + b"}", OK),
    "exponent_without_end": (b'{"prompt": "x", "temperature": 1e' + b"9" * 100_000 + b"}", 400),
    "negative_infinity": (b'{"prompt": "x", "logit_bias": {"1": -Infinity}}', 400),
    "nan_in_a_list": (b'{"prompt": [NaN]}', 400),
    "name_twice": (b'{"prompt": "x", "max_tokens": 1, "max_tokens": -1}', 400),
    "byte_order_mark": (b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}', 400),
    "utf_16_with_mark": (b"\xff\xfe{\x00}\x00", 400),
    "utf_32": ('{"prompt": "x"}'.encode("utf-32"), 400),
    "overlong_utf_8": (b'{"prompt": "\xc0\xaf"}', 400),
    "surrogate_in_utf_8": (b'{"prompt": "\xed\xa0\x80"}', 400),
    "lone_low_surrogate": (b'{"prompt": "\\udc00"}', 400),
    "pair_the_wrong_way_round": (b'{"prompt": "\\udc00\\ud800"}', 400),
    "surrogate_in_a_model": (b'{"prompt": "x", "model": "\\ud800"}', 400),
    "raw_control_character": (b'{"prompt": "a\x01b"}', 400),
    "comment": (b'{"prompt": "x" /* hi */}', 400),
    "single_quotes": (b"{'prompt': 'x'}", 400),
    "trailing_comma": (b'{"prompt": "x",}', 400),
    "two_objects": (b'{"prompt": "x"}{"prompt": "y"}', 400),
    "only_blanks": (b" " * 100_000, 400),
    "null": (b"null", 400),
    "text": (b'"prompt"', 400),
    "hundred_thousand_names": (json.dumps({f"n{i}": 1 for i in range(100_000)}).encode(), 400),
    "python_pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os.", 400),
}


@pytest.mark.parametrize("name", RAW)
def test_bomb_or_broken_text_is_refused(house: House, name: str) -> None:
    raw, status = RAW[name]
    assert_refused(house, post(house, "/v1/completions", raw), status)


def test_compressed_bombs_are_refused_before_they_are_large(house: House) -> None:
    for encoding, bomb in (("gzip", gzip.compress(b" " * 2**25)), ("deflate", zlib.compress(b" " * 2**25))):
        assert_refused(house, post(house, "/v1/completions", bomb, {"Content-Encoding": encoding}), 413)
    nested = gzip.compress(gzip.compress(b" " * 2**24))
    assert_refused(house, post(house, "/v1/completions", nested, {"Content-Encoding": "gzip"}), 400)


GIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "n": ({"n": 10**9}, 400),
    "n_over_the_limit": ({"n": 17}, 400),
    "best_of": ({"best_of": 10**9, "max_tokens": 1}, 400),
    "allowed_ids": ({"allowed_token_ids": list(range(5000))}, 400),
    "allowed_ids_forbidden": ({"allowed_token_ids": [5], "bad_words": ["a"] * 32, "max_tokens": 3}, OK),
    "bad_words": ({"bad_words": ["a"] * 100_000}, 400),
    "bad_words_length": ({"bad_words": ["a" * 2_000_000]}, 400),
    "salt": ({"cache_salt": "s" * 1_000_000}, 400),
    "cut_to_nothing": ({"truncate_prompt_tokens": 0}, 400),
    "cut_long_prompt": ({"prompt": "a " * 200_000, "truncate_prompt_tokens": 4, "max_tokens": 1}, OK),
    "ignored_giant": ({"vllm_xargs": {str(i): [i] * 10 for i in range(10_000)}, "max_tokens": 1}, OK),
    "logprobs": ({"logprobs": 10**9}, 400),
    "prompt_logprobs": ({"prompt_logprobs": 2**62}, 400),
    "max_tokens": ({"max_tokens": 2**62}, 400),
    "min_tokens": ({"min_tokens": 2**62}, 400),
    "top_k": ({"top_k": 2**62}, 400),
    "top_k_of_all": ({"top_k": 2**31 - 1, "max_tokens": 1}, OK),
    "seed": ({"seed": 2**64}, 400),
    "seed_negative": ({"seed": -(2**63), "max_tokens": 1}, OK),
    "stop_count": ({"stop": ["a"] * 100_000}, 400),
    "stop_length": ({"stop": "a" * 2_000_000}, 400),
    "stop_lengths": ({"stop": [chr(97 + i) * 500_000 for i in range(16)]}, 400),
    "stop_ids": ({"stop_token_ids": list(range(300))}, 400),
    "stop_ids_huge": ({"stop_token_ids": [2**70]}, 400),
    "logit_bias_count": ({"logit_bias": {str(i): 1 for i in range(50_000)}}, 400),
    "logit_bias_key_digits": ({"logit_bias": {"9" * 5000: 1}}, 400),
    "logit_bias_key_unicode_digits": ({"logit_bias": {"\u0661": 1}}, 400),
    "logit_bias_value": ({"logit_bias": {"1": 10**400}, "max_tokens": 1}, OK),  # cut to 100
    "logit_bias_value_negative": ({"logit_bias": {"1": -(10**400)}, "max_tokens": 1}, OK),
    "prompt_count": ({"prompt": ["x"] * 100_000}, 400),
    "prompt_ids": ({"prompt": [1] * 1_000_000}, 400),
    "prompt_id_huge": ({"prompt": [2**80]}, 400),
    "prompt_text": ({"prompt": "x" * 10_000_000}, 400),
    "prompt_of_spaces": ({"prompt": " " * 3_000_000}, 400),
    "prompt_of_one_letter_words": ({"prompt": "a " * 500_000}, 400),
    "n_times_prompts": ({"prompt": ["x"] * 64, "n": 16, "max_tokens": 200}, 400),
    "adapters": ({"adapters": [{"id": "acme/a"}] * 1000}, 400),
    "adapter_twice": ({"adapters": [{"id": "acme/a"}, {"id": "acme/a"}]}, 400),
    "scale": ({"adapters": [{"id": "acme/a", "scale": 1e308}]}, 400),
    "scale_negative_giant": ({"adapters": [{"id": "acme/a", "scale": -1e9}]}, 400),
    "user": ({"user": "u" * 1_000_000, "max_tokens": 1}, OK),
    "priority": ({"priority": 10**30}, 400),
    "timeout": ({"timeout_ms": 10**18}, 400),
    "model": ({"model": "m" * 1_000_000}, 400),
    "repetition_penalty": ({"repetition_penalty": 1e-300, "max_tokens": 2}, OK),
    "temperature_tiny": ({"temperature": 5e-324, "max_tokens": 2}, OK),
    "top_p_tiny": ({"top_p": 5e-324, "max_tokens": 2}, OK),
    "all_biases_down": ({"logit_bias": {str(i): -100 for i in range(290)}, "max_tokens": 2}, OK),
    "all_tokens_stop": ({"stop_token_ids": list(range(256)), "max_tokens": 8}, OK),
}


@pytest.mark.parametrize("name", GIANTS)
def test_giant_is_refused_or_answered(house: House, name: str) -> None:
    change, status = GIANTS[name]
    reply = post(house, "/v1/completions", {"prompt": "x", **change})
    assert_refused(house, reply, status)


IDS = {
    "cyrillic_a": "\u0430cme/a",
    "full_width": "\uff41\uff43\uff4d\uff45/a",
    "zero_width_space": "acme\u200b/a",
    "right_to_left": "\u202eacme/a",
    "combining": "acme\u0301/a",
    "other_case": "ACME/A",
    "trailing_space": "acme/a ",
    "trailing_newline": "acme/a\n",
    "nul": "acme/a\x00",
    "parent": "acme/../globex/a",
    "dot": "./acme/a",
    "doubled_slash": "acme//a",
    "backslash": "acme\\a",
    "encoded_slash": "acme%2fa",
    "absolute": "/etc/passwd",
    "url": "http://169.254.169.254/latest",
    "version_zero": "acme/a@0",
    "version_huge": "acme/a@" + "9" * 400,
    "version_negative": "acme/a@-1",
    "version_digest": "acme/a@sha256:" + "0" * 64,
    "version_twice": "acme/a@1@1",
    "base_of_base": "tiny:tiny",
    "base_then_nothing": "tiny:",
    "comma": "acme/a,acme/b",
    "template": "{{7*7}}",
    "format": "%s%n{0.__class__}",
    "sql": "a' OR '1'='1",
    "redis": "a\r\nFLUSHALL\r\n",
}


@pytest.mark.parametrize("name", IDS)
def test_trick_in_an_id_finds_no_adapter(house: House, name: str) -> None:
    for body in ({"model": IDS[name]}, {"adapter_id": IDS[name]}, {"adapters": [{"id": IDS[name]}]}):
        assert_refused(house, post(house, "/v1/completions", {"prompt": "x", **body}), (400, 404))


TEMPLATES = [
    "{{ 7 * 7 }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[0]['content'] }}",
    "{#",
    "{% raw %}",
    "{{" * 10_000,
]


@pytest.mark.parametrize("content", TEMPLATES, ids=lambda text: text[:20])
def test_template_in_a_message_is_text_like_any_other(house: House, content: str) -> None:
    reply = post(house, "/tokenize", {"messages": [{"role": "user", "content": content}]})
    assert reply.status == 200, reply.body[:300]
    back = post(house, "/detokenize", {"tokens": reply.json["tokens"]})
    assert content in back.json["prompt"]
    assert_tells_nothing(house, back)


CHATS: dict[str, dict[str, Any]] = {
    "template": {"chat_template": "{{ 7 * 7 }}"},
    "template_by_name": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    "tokenizer_setting": {"chat_template_kwargs": {"tokenize": True}},
    "template_value_deep": {"chat_template_kwargs": {"x": NESTED}},
    "template_values_many": {"chat_template_kwargs": {"x": [0] * 20_000}},
    "tools_deep": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": NESTED}}}]},
    "tools_many": {"tools": [{"type": "function", "function": {"name": "f"}}] * 20_000},
    "tool_names_the_same": {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
    "tool_name_giant": {"tools": [{"type": "function", "function": {"name": "f" * 50_000}}]},
    "tool_without_a_place": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "tool_choice_giant": {"tools": [], "tool_choice": {"type": "function", "function": {"name": "f" * 50_000}}},
    "arguments_giant": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 500_000}}]}]
    },
    "result_without_a_place": {"messages": [*HI, {"role": "tool", "content": "x"}]},
    "template_values_giant": {"chat_template_kwargs": {"tools": "x"}},
    "role_from_elsewhere": {"messages": [{"role": "root", "content": "x"}]},
    "role_template": {"messages": [{"role": "{{ 1 }}", "content": "x"}]},
    "no_content": {"messages": [{"role": "user"}]},
    "content_number": {"messages": [{"role": "user", "content": 5}]},
    "content_nested": {"messages": [{"role": "user", "content": [[[]]]}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
    "many_messages": {"messages": HI * 20_000},
    "tool_call": {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
    "message_list": {"messages": [HI]},
    "message_text": {"messages": "Hi"},
    "message_object": {"messages": {"role": "user", "content": "Hi"}},
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_that_asks_for_more_than_chat_is_refused(house: House, name: str) -> None:
    assert_refused(house, post(house, "/v1/chat/completions", {"messages": HI, "max_tokens": 1, **CHATS[name]}), 400)


OTHERS: dict[str, tuple[str, Any]] = {
    "tokenize_number": ("/tokenize", {"prompt": 5}),
    "tokenize_nothing": ("/tokenize", {}),
    "tokenize_surrogate": ("/tokenize", b'{"prompt": "\\ud800"}'),
    "detokenize_text": ("/detokenize", {"tokens": "abc"}),
    "detokenize_negative": ("/detokenize", {"tokens": [-1]}),
    "detokenize_outside": ("/detokenize", {"tokens": [10**6]}),
    "detokenize_huge": ("/detokenize", {"tokens": [2**70]}),
    "detokenize_fraction": ("/detokenize", {"tokens": [1.5]}),
    "embeddings_of_a_generator": ("/v1/embeddings", {"input": "x"}),
    "classify_of_a_generator": ("/classify", {"input": "x"}),
    "rerank_of_a_generator": ("/rerank", {"query": "x", "documents": ["y"]}),
    "score_of_a_generator": ("/score", {"text_1": "x", "text_2": "y"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_doors_refuse_as_well(house: House, name: str) -> None:
    path, body = OTHERS[name]
    assert_refused(house, post(house, path, body), (400, 404))
