"""gzip and deflate are undone to their own end, in a time that grows with the content."""

from __future__ import annotations

import gzip
import time
from random import Random

import pytest

from lora_serve.adapters.http_content import PIECE_BYTES, decoder_for
from tests.attempts import in_some_attempt

EMPTY = gzip.compress(b"", mtime=0)


@pytest.mark.parametrize("step", [1, 700, 2**20])
def test_members_of_all_sizes_follow_one_another(step: int) -> None:
    rng = Random(step)
    parts = [rng.randbytes(size) for size in (0, 1, 3000, 0, 70_000, 5, 0)]
    parts += [bytes(size) for size in (PIECE_BYTES, 3 * PIECE_BYTES + 1, PIECE_BYTES - 1, 2 * PIECE_BYTES)]
    packed = b"".join(gzip.compress(part) for part in parts)
    decoder = decoder_for("gzip", "It")
    found = [piece for at in range(0, len(packed), step) for piece in decoder.decode(packed[at : at + step])]
    decoder.finish()
    assert b"".join(found) == b"".join(parts)
    assert max(map(len, found)) <= PIECE_BYTES


def test_many_small_members_take_no_longer_than_their_bytes() -> None:
    chunk = EMPTY * (2**20 // len(EMPTY))

    def undo() -> None:
        began = time.process_time()
        assert list(decoder_for("gzip", "It").decode(chunk)) == []
        assert time.process_time() - began < 0.5

    in_some_attempt(undo)
