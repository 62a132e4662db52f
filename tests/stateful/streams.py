"""Answers that are held open while the registry changes under them."""

from __future__ import annotations

import json

from tests.stateful.letters import LETTERS
from tests.stateful.program import Program

PROMPT = [40 + number % 7 for number in range(40)]  # longer than two KV blocks, the same for all: a cache may serve it


class HeldStream:
    """One streamed answer, begun; it goes on until `finish` or `leave`."""

    def __init__(self, program: Program, model: str, user: str, seed: int) -> None:
        self.program = program
        self._seed = seed
        program.held.add(seed)
        self._connection = program.connected()
        body = {"model": model, "prompt": PROMPT, "user": user, "max_tokens": 15_000, "stream": True, "seed": seed}
        self._response = program.send(self._connection, "POST", "/v1/completions", body)
        assert self._response.status == 200, self._response.read()
        headers = self._response.headers
        self.meaning = (headers["X-Adapter-Id"], int(headers["X-Adapter-Version"]))
        self.digest = headers["X-Adapter-Digest"]
        self.content = -1  # set by whoever knows what the digest stands for

    def release(self) -> None:
        """Let it come to its end."""
        self.program.held.discard(self._seed)

    def finish(self) -> None:
        """Read it to its end: every letter of it must be the first adapter's."""
        self.release()
        lines = self._response.read().decode().strip().split("\n\n")
        self._connection.close()
        assert lines[-1] == "data: [DONE]", lines[-1]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert set(text) == {LETTERS[self.content]}, f"a stream of {LETTERS[self.content]} said {sorted(set(text))}"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    def leave(self) -> None:
        """As a client that goes away in the middle."""
        self._response.close()
        self._connection.close()
