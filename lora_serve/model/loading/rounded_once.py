"""Rounded checkpoints that a start made of a plain one, kept on the disk for the next start.

They lie in the user's cache by a digest of the rule and of what tells one plain checkpoint from another: names, sizes
and times of its files, their tables, and pages here and there of their numbers, so that a start reads no more of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.model.loading import rounding
from lora_serve.model.loading.checkpoint_files import read_header, reported, weight_files
from lora_serve.model.loading.observation import first_line
from lora_serve.model.loading.rounded_checkpoint import PlainCheckpoint
from lora_serve.model.native.library import cache_folder

_PAGE, _NUM_PAGES = 4096, 64  # of each file that are looked at
_log = logging.getLogger(__name__)


def rounded_once(config: ModelConfig, hf_config: Any, auto_class: Any, ends: ExitStack) -> Path:
    """The folder of the checkpoint of `config.model` rounded as `config.quantization` says. One that could not be kept
    goes when `ends` are closed, which is to be done once the weights are loaded. Raises ConfigError and ModelError.
    """
    words = f"--quantization {config.quantization}"
    try:
        name = f"{config.quantization}-{_digest(config.quantization, weight_files(config.model))[:32]}"
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {config.model}: its weights cannot be read: {first_line(error)}") from error
    try:
        cache = cache_folder() / "quantized"
        cache.mkdir(mode=0o700, exist_ok=True)
        with (cache / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("%s: another start is rounding this model; waiting", words)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(cache / name):
                for old in (*cache.glob(f".{name}-*"), cache / name):  # of a start that was killed; cut off
                    shutil.rmtree(old, ignore_errors=True)
                _make(config, hf_config, auto_class, cache / name)
            else:
                _log.info("%s: an earlier start rounded this model, into %s", words, cache / name)
            return cache / name
    except (OSError, RuntimeError) as error:
        reason = first_line(error)
        _log.warning(
            "%s: nothing is kept for the next start (XDG_CACHE_HOME chooses another folder): %s", words, reason
        )
    try:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="lora_serve-"))) / name
        _make(config, hf_config, auto_class, folder)
    except OSError as error:
        ends.close()
        reason = f"{first_line(error)}; give XDG_CACHE_HOME, or TMPDIR, a folder with room for the quantised model"
        raise ConfigError(f"{words}: it cannot be written anywhere: {reason}") from error
    return folder


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
    with reported(f"--model {config.model}", ModelError):
        _log.info("%s: %s", words, plain.write(out))


def _is_whole(folder: Path) -> bool:
    """False with a line of the log if it is there and cannot be used."""
    if not folder.exists():
        return False
    try:
        for file in weight_files(str(folder)):
            with safe_open(file, "pt"):
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
