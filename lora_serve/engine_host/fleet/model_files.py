"""A model's files, looked at before Ray starts: a replica that cannot load says it only after Ray's own start."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from lora_serve.core.errors import ModelError

_MAX_WORDS = 500


def check_model_files(model: str, has_weights: bool) -> None:
    """Raises ModelError for what no replica could load; `has_weights` is False if they are with the replicas alone."""
    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken folder
        raise ModelError(f"--model {model}: config.json cannot be used: {_words(error)}") from error
    if has_weights and Path(model).is_dir():
        _check_weights(Path(model))


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"--model {folder}: cannot be loaded: there are no weights, no file *.safetensors")
    for file in files:
        try:
            with safe_open(file, "np"):
                pass  # the header is read, and its tensors' places are compared with the file's size
        except Exception as error:  # safetensors has a kind of its own, and those of files
            raise ModelError(f"--model {folder}: cannot be loaded: {file.name}: {_words(error)}") from error


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_WORDS] or type(error).__name__
