"""A disk as the notes of `crash_points.c` tell it, and what a loss of power may leave of it.

The rules are POSIX' own, which promise least: bytes are on the disk once their file was synced, and a name once its
folder was. A rename is never half done, and of one name the older changes come first. What was not synced may be there
or not, each by itself. (Pillai et al., "All file systems are not created equal", OSDI 2014.)
"""

from __future__ import annotations

import enum
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

_HEAD = struct.Struct("IIII Q qq")
SECTOR = 512


class Call(enum.IntEnum):
    """As in crash_points.c."""

    CREATE = 1
    TRUNCATE = 2
    WRITE = 3
    SYNC = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    SEND = 10


@dataclass(frozen=True)
class Note:
    """A call that succeeded; `other`: the new name of a rename."""

    call: Call
    path: str
    other: str
    inode: int
    offset: int
    content: bytes


def read_notes(path: Path) -> list[Note]:
    """A process that was killed may have left half of the last one."""
    text, notes, at = path.read_bytes() if path.exists() else b"", [], 0
    while at + _HEAD.size <= len(text):
        call, length, other_length, _, inode, offset, size = _HEAD.unpack_from(text, at)
        ends = [at + _HEAD.size, at + _HEAD.size + length, at + _HEAD.size + length + other_length]
        end = ends[2] + (size if call == Call.WRITE else 0)
        if end > len(text):
            break
        names = [text[start:stop].decode() for start, stop in pairwise(ends)]
        notes.append(Note(Call(call), *names, inode, offset, text[ends[2] : end]))
        at = end
    return notes


@dataclass(eq=False)
class Node:
    """A file or a folder; `changes` of a file's content in their order."""

    is_folder: bool
    changes: list[Change] = field(default_factory=list)


Place = tuple[Node, str]  # a folder, and a name in it


@dataclass(eq=False)
class Change:
    """Of a file: `content` is written at `offset`, or (None) it gets the length `offset`. Of folders: `node` loses the
    name `taken` and gets the name `given`.
    """

    is_synced: bool = False
    content: bytes | None = None
    offset: int = 0
    node: Node | None = None
    taken: Place | None = None
    given: Place | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(place for place in (self.taken, self.given) if place is not None)


class Disk:
    """All below `root`, as it is now and for good; then as the calls of processes change it, one life after another."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._changes: list[Change] = []  # of folders, in order
        self._tree: dict[Node, dict[str, Node]] = {}
        self._by_inode: dict[int, Node] = {}
        self._start: dict[Node, dict[str, Node]] = {}
        self._top = self._found(root)
        self._start = {folder: dict(names) for folder, names in self._tree.items()}

    def play(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note.call is not Call.SEND:
                getattr(self, f"_{note.call.name.lower()}")(note)

    def content(self) -> dict[str, bytes | None]:
        """Every file and folder (None) as the processes see it, by path."""
        return dict(_listed(self._top, self._tree, lambda node: _content(node.changes)))

    def after_power_loss(self, loss: Loss, draw: random.Random) -> dict[str, bytes | None]:
        """What is found when the power is back."""
        tree = {folder: dict(names) for folder, names in self._start.items()}
        blocked: set[Place] = set()
        is_over = False
        for change in self._changes:
            is_over = is_over or (not change.is_synced and loss is Loss.IN_ORDER and draw.random() < 0.2)
            is_kept = change.is_synced or loss.keeps_name(draw, is_over)
            if not is_kept or (not change.is_synced and blocked.intersection(change.places)):
                blocked.update(change.places)
                continue
            _apply(tree, change)
        return dict(_listed(self._top, tree, lambda node: _content(loss.kept_content(node.changes, draw))))

    # -- calls -------------------------------------------------------------------------------------------------

    def _create(self, note: Note) -> None:
        self._by_inode[note.inode] = node = Node(is_folder=False)
        self._change(Change(node=node, given=self._place(note.path)))

    def _mkdir(self, note: Note) -> None:
        self._by_inode[note.inode] = node = Node(is_folder=True)
        self._tree[node] = {}
        self._change(Change(node=node, given=self._place(note.path)))

    def _link(self, note: Note) -> None:
        self._change(Change(node=self._by_inode[note.inode], given=self._place(note.path)))

    def _rename(self, note: Note) -> None:
        folder, name = self._place(note.path)
        node = self._tree[folder][name]
        self._change(Change(node=node, taken=(folder, name), given=self._place(note.other)))

    def _unlink(self, note: Note) -> None:
        folder, name = self._place(note.path)
        self._change(Change(node=self._tree[folder][name], taken=(folder, name)))

    _rmdir = _unlink

    def _truncate(self, note: Note) -> None:
        self._by_inode[note.inode].changes.append(Change(offset=note.offset))

    def _write(self, note: Note) -> None:
        self._by_inode[note.inode].changes.append(Change(content=note.content, offset=note.offset))

    def _sync(self, note: Note) -> None:
        node = self._by_inode[note.inode]
        for change in node.changes:
            change.is_synced = True
        if not node.is_folder:
            return
        places: set[Place] = set()
        for change in reversed(self._changes):  # what is kept keeps all that happened to its names before
            if not change.is_synced and any(place[0] is node or place in places for place in change.places):
                change.is_synced = True
                places.update(change.places)

    # ----------------------------------------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        _apply(self._tree, change)
        self._changes.append(change)

    def _place(self, path: str) -> Place:
        *folders, name = Path(path).relative_to(self._root).parts
        node = self._top
        for folder in folders:
            node = self._tree[node][folder]
        return node, name

    def _found(self, path: Path) -> Node:
        """A file or folder that is there from the start, with all below it."""
        if not path.is_dir():
            node = Node(is_folder=False, changes=[Change(is_synced=True, content=path.read_bytes())])
        else:
            node = Node(is_folder=True)
            self._tree[node] = {inner.name: self._found(inner) for inner in path.iterdir()}
        self._by_inode[path.stat().st_ino] = node
        return node


class Loss(enum.Enum):
    """Kinds of what a loss of power leaves of all that was not synced."""

    ALL = "nothing of it"
    SOME = "any part of it: names, writes, and sectors of writes"
    CONTENT = "the names, and no content"
    IN_ORDER = "names up to a moment, and any part of the content"

    def keeps_name(self, draw: random.Random, is_over: bool) -> bool:
        if self is Loss.SOME:
            return draw.random() < 0.5
        return self is Loss.CONTENT or (self is Loss.IN_ORDER and not is_over)

    def kept_content(self, changes: Sequence[Change], draw: random.Random) -> Iterator[Change]:
        for change in changes:
            if change.is_synced:
                yield change
            elif self in (Loss.SOME, Loss.IN_ORDER) and draw.random() < 0.5:
                if change.content and draw.random() < 0.3:
                    yield Change(
                        content=change.content[: SECTOR * draw.randint(0, len(change.content) // SECTOR)],
                        offset=change.offset,
                    )
                else:
                    yield change


def write_tree(folder: Path, tree: Mapping[str, bytes | None]) -> None:
    """Makes the files and folders, with the modes that the store gives its own."""
    folder.mkdir(mode=0o700)
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir(mode=0o700)
        else:
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)


def read_tree(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in paths}


def _apply(tree: dict[Node, dict[str, Node]], change: Change) -> None:
    assert change.node is not None
    if change.node.is_folder:
        tree.setdefault(change.node, {})
    for folder, name in (change.taken,) if change.taken else ():
        if tree.setdefault(folder, {}).get(name) is change.node:
            del tree[folder][name]
    for folder, name in (change.given,) if change.given else ():
        tree.setdefault(folder, {})[name] = change.node


def _listed(
    folder: Node, tree: Mapping[Node, Mapping[str, Node]], content: Callable[[Node], bytes], before: str = ""
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(tree.get(folder, {}).items(), key=lambda item: item[0]):
        yield before + name, None if node.is_folder else content(node)
        if node.is_folder:
            yield from _listed(node, tree, content, f"{before}{name}/")


def _content(changes: Iterable[Change]) -> bytes:
    text = bytearray()
    for change in changes:
        if change.content is None:
            text = text[: change.offset].ljust(change.offset, b"\0")
        else:
            end = change.offset + len(change.content)
            text = text.ljust(change.offset, b"\0")
            text[change.offset : end] = change.content
    return bytes(text)
