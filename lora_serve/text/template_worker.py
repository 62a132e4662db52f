"""A rendering process: `python -m lora_serve.text.template_worker` (core/worker_processes.py).

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from string import Formatter
from types import FrameType
from typing import Any

import jinja2
import jinja2.constants  # both are read when they are needed first, and no file can be opened then
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lora_serve.core.worker_processes import limit_memory, serve
from lora_serve.text.marked import Marks, joined, unpacked


class _Generation(Extension):
    """`{% generation %}`, with which trainers mark the assistant's text: what is inside is written as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict`, without the type's own attributes."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(*values: Any, **named: Any) -> None:  # a template may set `self`
        self, *given = values
        attributes = dict(*given, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


_DATA = (str, int, float, dict, list, tuple, set, datetime, jinja2.Undefined)


class _Environment(ImmutableSandboxedEnvironment):
    """Only data becomes text: Python writes the address of anything else in this process."""

    intercepted_binops = frozenset("%")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return super().call_binop(context, operator, left, shown(right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        found = super().wrap_str_format(value)

        def written(*values: Any, **named: Any) -> str:
            for _, field, form, _ in Formatter().parse(value.__self__):
                if "." in (field or "") or "{" in (form or ""):  # an attribute of data is no data
                    raise jinja2.exceptions.SecurityError("A template cannot write an attribute by `format`.")
            assert found is not None
            return found(*shown(values), **shown(named))

        return None if found is None else written


def shown(value: Any) -> Any:
    """The value, which may become a part of the text. Raises SecurityError."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            left += one
        elif not (one is None or isinstance(one, _DATA)):
            raise jinja2.exceptions.SecurityError(f"A template cannot write a {type(one).__name__}.")
    return value


@jinja2.pass_context  # so that nothing is written before it is rendered
def _finalized(context: Context, value: Any) -> Any:
    return shown(value)


def _of_data(own: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is given data only; iterators as lists."""

    @functools.wraps(own)
    def filtered(*values: Any, **named: Any) -> Any:
        place = 1 if hasattr(own, "jinja_pass_arg") else 0
        given = [
            list(one) if isinstance(one, Iterable) and not isinstance(one, _DATA) else one for one in values[place:]
        ]
        return own(*values[:place], *shown(given), **shown(named))

    return filtered


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment; joining pieces keeps the marks of marked texts."""
    extensions: list[type[Extension]] = [_Generation, loopcontrols]
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalized, optimized=False
    )
    made.concat = joined  # type: ignore[method-assign]
    made.filters = {name: _of_data(own) for name, own in made.filters.items()}
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return made


def compiled(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    """The template. Raises what jinja2 raises."""
    template = environment.from_string(source)
    names: dict[str, Any] = template.root_render_func.__globals__
    names["str_join"] = lambda pieces: joined(shown(list(pieces)))  # of this template alone: its `~`
    return template


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(str(shown(message)))


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace cannot hold {name!r}.")


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

    serve(lambda job: json.dumps(_limited(renderer, json.loads(job), seconds)).encode(), prepare)


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
