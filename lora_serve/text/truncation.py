"""Encodes texts, and cuts those that are too long as the tokenizer itself would, but without changing its state.

The library truncates with settings of the tokenizer, which all threads share; its parts are used here one by one.
"""

from __future__ import annotations

from tokenizers import Encoding, Tokenizer

from lora_serve.core.errors import InvalidRequestError


def encoded(tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool) -> Encoding:
    """A text, or two. A batch of one, as `encode` keeps Python's lock until its end; without offsets, which nobody
    reads and which take longer to free than to make.
    """
    given = text if pair is None else (text, pair)
    (encoding,) = tokenizer.encode_batch_fast([given], add_special_tokens=add_special_tokens)
    return encoding


def cut(
    tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool, max_tokens: int, side: str
) -> Encoding:
    """`max_tokens` at most, special tokens among them. `side`: "right" or "left", where tokens are lost.

    Raises InvalidRequestError if the special tokens alone are more.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
    room = max_tokens - num_special
    if room < 0:
        message = f"`truncate_prompt_tokens` ({max_tokens}) leaves no room beside {num_special} special tokens."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    first = encoded(tokenizer, text, None, add_special_tokens=False)
    second = None if pair is None else encoded(tokenizer, pair, None, add_special_tokens=False)
    num_first, num_second = longest_first(len(first), 0 if second is None else len(second), room)
    first.truncate(num_first, 0, side)
    if second is not None:
        second.truncate(num_second, 0, side)
    return tokenizer.post_process(first, second, add_special_tokens)


def longest_first(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """What is left of two texts' tokens: the longer one loses first, as by `tokenizers`' strategy of that name."""
    if num_first + num_second <= room:
        return num_first, num_second
    short = min(num_first, num_second)
    if 2 * short >= room:
        half, odd = divmod(room, 2)
        return (half, half + odd) if num_first <= num_second else (half + odd, half)
    long = room - short
    return (short, long) if num_first <= num_second else (long, short)
