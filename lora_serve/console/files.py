"""The files of the console's page: package data, read once. No name from a URL ever becomes a path."""

from __future__ import annotations

import functools
import gzip
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_IMPORT = re.compile(r"""^(?:import|export)\s[^"';]*?["'](\.{1,2}/[^"']+)["']""", re.MULTILINE)
_ENTRY = "main.js"
FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it goes out, plain and compressed."""

    content: bytes
    compressed: bytes  # gzip
    media_type: str
    etag: str  # of the plain bytes, without quotes


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Name as in a URL (`lib/api.js`) -> file. Takes some tens of milliseconds, once: call it on a thread."""
    found = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }
    found[INDEX] = _with_preloads(found)
    return {name: _made(name, content) for name, content in found.items()}


def _made(name: str, content: bytes) -> PageFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[Path(name).suffix], digest)


def _with_preloads(files: Mapping[str, bytes]) -> bytes:
    """The page with a link to each module that its first one imports, and that those import: a browser asks for all of
    them at once, in place of one level after another.
    """
    links = "".join(f'    <link rel="modulepreload" href="{name}">\n' for name in imported(files, _ENTRY))
    return files[INDEX].replace(b"  </head>", links.encode() + b"  </head>")


def imported(files: Mapping[str, bytes], entry: str) -> list[str]:
    """The modules that are loaded with `entry`, without itself. Raises KeyError if one of them is not there."""
    known, waiting = {entry}, [entry]
    while waiting:
        name = waiting.pop()
        for target in _IMPORT.findall(files[name].decode()):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            if path not in known:
                known.add(path)
                waiting.append(path)
    return sorted(known - {entry})
