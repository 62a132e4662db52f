"""Rounded checkpoints that a start made of a plain one, kept on the disk for the next start.

They lie in the user's cache by a digest of the rule and of what tells one plain checkpoint from another: names, sizes
and times of its files, their tables, and pages here and there of their numbers, so that a start reads no more of them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.model.loading import rounding
from lora_serve.model.loading.checkpoint_files import read_header, weight_files
from lora_serve.model.loading.observation import first_line
from lora_serve.model.loading.rounded_checkpoint import PlainCheckpoint
from lora_serve.model.native.library import cache_folder

_PAGE, _NUM_PAGES = 4096, 64  # of each file that are looked at
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundedOnce:
    """A checkpoint in a folder, which goes when it is closed, if it could not be kept."""

    folder: Path
    ends: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """To be called once the weights are loaded."""
        self.ends.close()


def rounded_once(config: ModelConfig, hf_config: Any, auto_class: Any) -> RoundedOnce:
    """The checkpoint of `config.model` rounded as `config.quantization` says. Raises ConfigError and ModelError."""
    make = functools.partial(_make, config, hf_config, auto_class)
    try:
        name = f"{config.quantization}-{_digest(config.quantization, weight_files(config.model))[:32]}"
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {config.model}: its weights cannot be read: {first_line(error)}") from error
    try:
        cache = cache_folder() / "quantized"
        cache.mkdir(mode=0o700, exist_ok=True)
        with _locked(cache / f"{name}.lock", config):
            if not _is_whole(cache / name):
                for old in (*cache.glob(f".{name}-*"), cache / name):  # of a start that was killed; cut off
                    shutil.rmtree(old, ignore_errors=True)
                make(cache / name)
            return RoundedOnce(cache / name)
    except (OSError, RuntimeError) as error:
        _log.warning(
            "--quantization %s: nothing is kept for the next start (XDG_CACHE_HOME chooses another folder): %s",
            config.quantization, first_line(error),
        )  # fmt: skip
    with ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="lora_serve-")
            stack.callback(temporary.cleanup)
            make(Path(temporary.name) / name)
        except OSError as error:
            words = f"{first_line(error)}; give XDG_CACHE_HOME, or TMPDIR, a folder with room for the quantised model"
            raise ConfigError(
                f"--quantization {config.quantization}: it cannot be written anywhere: {words}"
            ) from error
        return RoundedOnce(Path(temporary.name) / name, stack.pop_all())


def _make(config: ModelConfig, hf_config: Any, auto_class: Any, out: Path) -> None:
    """Raises ConfigError, ModelError, and OSError where it cannot be written."""
    words = f"--quantization {config.quantization}: {config.model}"
    try:
        plain = PlainCheckpoint.find(config.model, hf_config, auto_class, config.quantization)
    except ValueError as error:
        raise ConfigError(f"{words}: {error}; leave the flag out") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"--model {config.model}: its weights cannot be read: {first_line(error)}") from error
    _log.info("%s is rounded once, into %s", words, out)
    try:
        _log.info("%s: %s", words, plain.write(out))
    except ValueError as error:
        raise ModelError(f"--model {config.model}: {error}") from error


@contextmanager
def _locked(path: Path, config: ModelConfig) -> Iterator[None]:
    """Inside the block no other start makes the same. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("--quantization %s: another start is rounding this model; waiting", config.quantization)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_whole(folder: Path) -> bool:
    """False with a line of the log if it is there and cannot be used."""
    if not folder.exists():
        return False
    try:
        for file in weight_files(str(folder)):
            with safe_open(file, "pt"):  # type: ignore[no-untyped-call]
                pass
        return isinstance(json.loads((folder / "config.json").read_bytes()), dict)
    except (OSError, ValueError, SafetensorError) as error:
        _log.warning("%s is made anew, as it cannot be read: %s", folder, first_line(error))
        return False


def _digest(kind: str, files: Sequence[Path]) -> str:
    """Raises OSError."""
    digest = hashlib.sha256(f"{rounding.VERSION} {kind}".encode())
    digest.update((files[0].parent / "config.json").read_bytes())
    for path in files:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            table, start = read_header(file)
            digest.update(json.dumps([path.name, facts.st_size, facts.st_mtime_ns, table]).encode())
            for page in range(_NUM_PAGES):
                file.seek(start + (facts.st_size - start) * page // _NUM_PAGES)
                digest.update(file.read(_PAGE))
    return digest.hexdigest()
