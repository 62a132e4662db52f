"""Imports transformers without the packages that it imports only in case: half of a server's start was such imports.

transformers marks functions for torch's compiler, which loads the whole compiler, and looks for packages that only
other uses of it need. This server compiles nothing. So while transformers is imported those marks do nothing and those
packages seem to be absent; afterwards everything is as before, and code that asks for the compiler gets it. An import
that fails this way is repeated the ordinary way. No other module of this project may be imported before.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.compiler
import torch.distributed

from lora_serve.core.gguf_file import gguf_of
from lora_serve.core.process import without_collections

_COMPILER = "torch._dynamo"
_TRACING = f"{_COMPILER}._trace_wrapped_higher_order_op"
_UNUSED = ("scipy", "sklearn")  # losses of tasks that are not served, measures of generation's output
_OF_QUANTIZED = ("torchao", "accelerate", "bitsandbytes")
# Values of `quant_method` that this project reads without them (`packed_checkpoints.py`).
READ_ALONE = frozenset({"awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt"})
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
_ENTRANCES = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.generation.utils")


def import_transformers(quantization: str, model: str) -> None:
    """Imports transformers once per process, before any other import of it. Packages that quantise are not hidden if
    the model may need them.
    """
    hidden = _UNUSED if _needs_quantizers(quantization, model) else _UNUSED + _OF_QUANTIZED
    try:
        with _lean(hidden):
            _import()
    except (ImportError, AttributeError, TypeError, KeyError):  # another release: the ordinary, slower way
        _import()


def _import() -> None:
    with without_collections():
        names = vars(importlib.import_module("transformers.utils.import_utils"))
        with _replaced(names, "define_import_structure", _known_structure):
            importlib.import_module("transformers.models")
        for name in _ENTRANCES:
            importlib.import_module(name)


def _known_structure(module_path: str, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
    """The index of `transformers.models`, taken from that of `transformers`, which has read all files already."""
    known = vars(sys.modules["transformers"])["_import_structure"]
    of_models = {name: set(what) for name, what in known.items() if name.startswith("models.")}
    return {frozenset(): {name.removeprefix("models."): what for name, what in of_models.items()}}


def _needs_quantizers(quantization: str, model: str) -> bool:
    """True if other packages may have to quantise the model, or to read it; also if it is not downloaded yet."""
    if gguf_of(model) is not None:
        return False
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return True
    stored = config.get("quantization_config") if isinstance(config, dict) else {}
    if stored is None:
        return quantization != "none" and torch.cuda.is_available()
    return not isinstance(stored, dict) or stored.get("quant_method") not in READ_ALONE


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside the block, marks for torch's compiler do nothing and do not load it, unless it is loaded already.

    Any other use of the compiler fails with ImportError or AttributeError.
    """
    if _COMPILER in sys.modules:
        yield
        return
    compiler, tracing = _AbsentCompiler(_COMPILER), _AbsentCompiler(_TRACING)
    vars(tracing)["TransformGetItemToIndex"] = _transform_get_item_to_index
    with ExitStack() as stack:
        stack.enter_context(_standing_in({_COMPILER: compiler, _TRACING: tracing}))
        stack.enter_context(_replaced(vars(torch), "_dynamo", compiler))
        for mark in _MARKS:
            stack.enter_context(_replaced(vars(torch.compiler), mark, _unmarked))
        yield


@contextmanager
def _lean(hidden: tuple[str, ...]) -> Iterator[None]:
    """All changes to other packages that hold while transformers is imported."""
    absent = {name: None for name in hidden if name not in sys.modules}
    alone = _replaced(vars(torch.distributed), "is_available", lambda: False)
    with without_compiler(), _standing_in(absent), alone:
        yield


@contextmanager
def _standing_in(modules: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block imports of these names find `modules`; None: there seems to be no such package."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name, ...) is module:
                del sys.modules[name]


@contextmanager
def _replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Inside the block one of a module's names has another value; a name that it had not is removed afterwards."""
    before = {name: names[name]} if name in names else {}
    names[name] = value
    try:
        yield
    finally:
        del names[name]
        names.update(before)


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """The function itself, in the place of its marked form."""
    return function if function is not None else _unmarked


class _AbsentCompiler(ModuleType):
    """Stands for the compiler with marks that do nothing. Any other use of it ends the lean import."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _MARKS:
            return _unmarked
        raise AttributeError(f"{self.__name__} is not imported yet")


def _transform_get_item_to_index() -> Any:
    """The compiler's own object, imported when it is first used."""
    return importlib.import_module(_TRACING).TransformGetItemToIndex()
