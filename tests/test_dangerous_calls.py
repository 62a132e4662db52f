"""No code of this repository runs what it was given: found in the syntax tree, so that words about it are none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "commands",
}
NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
CALLS = {  # by the names that they are reached by
    "torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "builtins.eval", "builtins.exec", "runpy.run_path",
    "torch.hub.load", "asyncio.create_subprocess_shell", "torch.serialization.load",
}  # fmt: skip
METHODS = {"extractall", "unpack_archive", "from_string", "loads_pickle"}
FLAGS = {"shell", "trust_remote_code", "allow_pickle"}  # may be given, but only as False
ALLOWED = {"benchmarks/peers/vllm.py", "lora_serve/core/vllm_table.py"}  # name flags of another program
ALLOWED_CALLS = {
    ("lora_serve/text/template.py", "environment.from_string"),  # the base's template, in the sandbox
    (
        "lora_serve/text/template_worker.py",
        "environment.from_string",
    ),  # adapters' templates, in processes of their own
}


def dangers(source: str) -> Iterator[str]:
    """What is dangerous in `source`, each as `line: what`."""
    tree = ast.parse(source)
    known = _imported(tree)
    for node in ast.walk(tree):
        for what in _dangers_of(node, known):
            yield f"{node.lineno}: {what}"  # type: ignore[attr-defined]


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dangers_of(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        case ast.ImportFrom() if node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from full & CALLS
            if node.module.partition(".")[0] in MODULES:
                yield node.module
        case ast.Name(id=name) if name in NAMES:
            yield name
        case ast.Attribute():
            name = _full_name(node, known)
            if name in CALLS or name.rpartition(".")[2] in METHODS:
                yield name
        case ast.keyword(arg=str(name)) if name in FLAGS:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{name}="
        case ast.Constant(value=str(text)) if text.lstrip("-").replace("-", "_") == "trust_remote_code":
            yield text


def _full_name(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def python_files() -> list[Path]:
    files = [path for folder in ("lora_serve", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    return sorted(files)


def test_no_dangerous_call_in_the_repository() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{danger}"
        for file in python_files()
        if str(file.relative_to(ROOT)) not in ALLOWED
        for danger in dangers(file.read_text())
        if (str(file.relative_to(ROOT)), danger.partition(": ")[2]) not in ALLOWED_CALLS
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import marshal",
        "import torch\ntorch.load(x)",
        "import torch as t\nread = t.load",
        "from torch import load",
        "eval(text)",
        "run = exec",
        "__import__(name)",
        "import yaml\nyaml.load(text)",
        "from yaml import unsafe_load",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "subprocess.run('x', shell=flag)",
        "import os\nos.system('x')",
        "from os import system",
        "archive.extractall(folder)",
        "shutil.unpack_archive(a, b)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=settings.trust)",
        "options = {'trust_remote_code': True}",
        "arguments = ['--trust-remote-code']",
        "import numpy\nnumpy.load(x, allow_pickle=True)",
        "import torch\ntorch.hub.load('a', 'b')",
    ],
)
def test_each_danger_is_seen(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""No pickle, no eval(), no shell=True here."""',
        "# torch.load(x)",
        "model.eval()",
        "load = store.load(x)",
        "import safetensors.torch\nsafetensors.torch.load(x)",
        "import yaml\nyaml.safe_load(text)",
        "subprocess.run(['x'], shell=False)",
        "from_pretrained(x, trust_remote_code=False)",
        "PICKLE_NAME = 'adapter_model.bin'",
        "import re\nre.compile('x')",
    ],
)
def test_what_only_sounds_dangerous_is_not_taken_for_it(source: str) -> None:
    assert list(dangers(source)) == []
