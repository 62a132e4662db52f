"""Ways in which a catalog is lost or damaged: a SQLite file's, and Redis'."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import redis

NAME = "catalog.sqlite3"
NAMES_OF_COMMITS = ("lora_serve:registry:heads", "lora_serve:registry:changes")
POSITION = "lora_serve:registry:position"
Dumps = dict[bytes, bytes]


class SqliteDamage:
    """Of the catalog in a store folder that nobody has open."""

    kinds = ("none", "removed", "emptied", "truncated", "zeroed", "older", "write_ahead_log")
    hides_the_fork = False

    def __init__(self, store: Path, draw: random.Random) -> None:
        self._store = store
        self._draw = draw
        self._older = store.parent / "older"

    def remember(self) -> None:
        """The files as they are now may be put back later."""
        shutil.rmtree(self._older, ignore_errors=True)
        self._older.mkdir()
        for path in self._store.glob(f"{NAME}*"):
            shutil.copyfile(path, self._older / path.name)

    def do(self, kind: str) -> bool:
        """Whether anything may have been lost."""
        path = self._store / NAME
        if not path.exists() or kind == "none":
            return False
        size = path.stat().st_size
        if kind == "removed":
            self._remove()
        elif kind == "emptied":
            self._remove()
            path.touch()
        elif kind == "truncated":
            os.truncate(path, self._draw.randrange(size))
        elif kind == "zeroed":
            with path.open("r+b") as file:
                for _ in range(self._draw.randint(1, 3)):
                    file.seek(4096 * self._draw.randrange(max(1, size // 4096)))
                    file.write(bytes(4096))
        elif kind == "older":
            if not self._older.is_dir():
                return False
            self._remove()
            for old in self._older.iterdir():
                shutil.copyfile(old, self._store / old.name)
        elif kind == "write_ahead_log":
            (self._store / f"{NAME}-wal").unlink(missing_ok=True)
        return True

    def _remove(self) -> None:
        for path in (self._store / f"{NAME}{end}" for end in ("", "-wal", "-shm")):
            path.unlink(missing_ok=True)


class RedisDamage:
    """Of the registry in Redis, with or without the copy that a replica keeps of it; the replica's cache stays."""

    kinds = ("none", "flushed", "set_back", "registry_keys", "blob_keys", "any_keys")

    def __init__(self, store: Path, draw: random.Random, url: str) -> None:
        self._store = store
        self._draw = draw
        self._redis = redis.Redis.from_url(url)
        self._older: Dumps | None = None
        self._nameless_epoch = b""  # that of a registry whose commits' names since the older state are all gone
        # Of the last damage: nothing tells whether the Redis that is back is an older state or went on from elsewhere.
        self.hides_the_fork = False

    def close(self) -> None:
        self._redis.close()

    def remember(self) -> None:
        keys = list(self._redis.scan_iter())
        self._older = {key: text for key in keys if (text := self._redis.dump(key)) is not None}
        self._nameless_epoch = b""

    def do(self, kind: str) -> bool:
        epoch, self.hides_the_fork = self._epoch(), False
        if kind == "none":
            return False
        if kind == "flushed":
            self._redis.flushall()
        elif kind == "set_back":
            if self._older is None:
                return False
            self._redis.flushall()
            for key, text in self._older.items():
                self._redis.restore(key, 0, text)
        else:
            self._remove_some(kind)
        keeps_mirror = self._draw.random() >= 0.5
        if not keeps_mirror:
            for path in self._store.glob("mirror.sqlite3*"):
                path.unlink()
        if kind == "set_back":
            self.hides_the_fork = keeps_mirror and epoch != b"" and epoch == self._nameless_epoch
            self._nameless_epoch = b""
        elif not keeps_mirror and not self._redis.exists(*NAMES_OF_COMMITS):
            self._nameless_epoch = self._epoch()
        return True

    def _epoch(self) -> bytes:
        return self._redis.hget(POSITION, "epoch") or b""

    def _remove_some(self, kind: str) -> None:
        mine = {
            "registry_keys": lambda key: b":registry:" in key,
            "blob_keys": lambda key: b":adapters:" in key,
            "any_keys": lambda key: True,
        }[kind]
        keys = sorted(key for key in self._redis.scan_iter() if mine(key))
        for key in self._draw.sample(keys, self._draw.randint(1, len(keys)) if keys else 0):
            self._redis.delete(key)
