"""A rendering process: `python -m lora_serve.text.rendering.worker` (core/worker_processes.py).

Whatever a template does, the process ends or answers: Python's own code is stopped by a first timer, anything below it
by a second one, at which the kernel ends the process; memory beyond the bound cannot be had. The process opens no file
and no connection, has no secret of the server's, and ends with the socket.
"""

from __future__ import annotations

import functools
import gc
import json
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.constants  # both are read when they are needed first, and no file can be opened then
import jinja2.debug

from lora_serve.core.worker_processes import limit_memory, serve
from lora_serve.text.marked import Marks
from lora_serve.text.rendering.sandbox import compiled, make_environment
from lora_serve.text.rendering.wire import frame_of, unpacked

KILLED_AFTER = 1.6  # times the seconds that a template may have, the kernel ends the process
MEMORY_BYTES = 256 * 2**20  # beside what the process needs itself
MAX_MESSAGE = 500  # characters of an error's
_NAME = "<template>"  # jinja2's, of a template that comes from no file
_REMEMBERED = 32  # compiled templates


class _TooSlow(BaseException):  # which no `except Exception` of a filter catches
    """The time is over."""


def main() -> None:
    """Answer jobs until the server closes the socket."""
    renderer, seconds = _Renderer(), float(sys.argv[1])

    def prepare() -> None:
        signal.signal(signal.SIGPROF, _stop)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        renderer.answer(
            {"source": "{{ strftime_now('%Y') }}{{ [1]|tojson }}", "render": {"names": [1, []], "meanings": {}}}
        )  # imports all
        _limit()

    serve(lambda job: frame_of(_limited(renderer, json.loads(job), seconds)), prepare)


class _Renderer:
    """The templates that were asked for last, compiled."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._compiled = functools.lru_cache(_REMEMBERED)(functools.partial(compiled, self._environment))

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """The rendered text, and its true text; neither for a job that has only a source."""
        template = self._compiled(job["source"])
        render = job.get("render")
        if render is None:
            return {}
        marks = Marks.of(render["meanings"])
        text = template.render(unpacked(render["names"], marks.meaning))
        if len(text) > job.get("max_characters", len(text)):
            return {"limit": f"it writes more than {job['max_characters']} characters"}
        true = marks.meaning(text)
        true.encode()  # raises UnicodeEncodeError: no tokenizer takes half a surrogate pair
        return {"text": str.__str__(text), "true": true}


def _limited(renderer: _Renderer, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The answer, or the reason why there is none: `limit`, or `error` of the template's own."""
    try:
        with _timers(seconds):
            return renderer.answer(job)
    except _TooSlow:
        return {"limit": f"it takes more than {seconds:g} s of the processor"}
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "recursion"
        del error
        gc.collect()
        return {"limit": f"it takes more {what} than there may be"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"[:MAX_MESSAGE]}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:MAX_MESSAGE], "line": _line(error)}


def _line(error: Exception) -> int | None:
    """The line of the template, as jinja2 has written it into the traceback."""
    lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _NAME]
    return lines[-1] if lines else None


@contextmanager
def _timers(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_VIRTUAL, KILLED_AFTER * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _TooSlow


def _limit() -> None:
    """Give up what no template needs."""
    limit_memory(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    sys.setrecursionlimit(500)


if __name__ == "__main__":
    main()
