"""jinja2's immutable sandbox with the names that transformers gives chat templates, without importing transformers.

It must write what transformers (`utils/chat_template_utils.py`) writes; tests/text/rendering compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lora_serve.text.marked import joined


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
