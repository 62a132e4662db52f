"""`lora-serve quantize`: a plain checkpoint written anew with packed weights, in the format of compressed-tensors.

Exit codes: 0 well, 2 a wrong command line, or a model that cannot be quantised.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.flags import FlagParser

_EPILOG = """
OUT has all that MODEL's folder has: tokenizer, chat template and the like are copied. Rounded are the text decoder's
linear layers and experts that are stored one by one; the rest stays as it is. int4: groups of 128 weights share a
scale, of 64 or 32 where 128 do not divide a layer; int8 and fp8 have a scale for each output.
`lora-serve serve OUT`, vLLM and others load it.

examples:
  lora-serve quantize ./llama ./llama-int4
  lora-serve quantize ./llama ./llama-fp8 --to fp8
  lora-serve quantize ./llama ./llama-int4 --group-size 32
"""


def run(arguments: list[str]) -> int:
    """Writes the checkpoint; returns the exit code. Raises ConfigError and ModelError."""
    parser = FlagParser("lora-serve quantize", "Write a checkpoint with packed weights (compressed-tensors).", {})
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a plain checkpoint, in safetensors")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; it must not be there yet")
    parser.add_argument("--to", choices=("int4", "int8", "fp8"), default="int4", help="default: int4")
    help_text = "weights that share a scale, 32, 64 or 128, with int4; it must divide every layer's inputs"
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), metavar="N", help=help_text)
    flags = parser.parse_args(arguments)
    model, out = flags.model, flags.out
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT: {out} is there already; give a folder that is not")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT: {out.parent} is no folder")
    if Path(model).is_dir() and out.resolve().is_relative_to(Path(model).resolve()):
        raise ConfigError(f"OUT: {out} would lie inside MODEL")
    if flags.group_size is not None and flags.to != "int4":
        raise ConfigError(f"--group-size {flags.group_size}: {flags.to} has a scale for each output; with int4 only")
    sys.stdout.write(f"{out}: {_quantize(model, out, flags.to, flags.group_size)}\n")
    return 0


def _quantize(model: str, out: Path, kind: str, group_size: int | None) -> str:
    """Returns what was done. Raises ConfigError and ModelError."""
    from huggingface_hub import snapshot_download
    from safetensors import SafetensorError

    from lora_serve.app.early_checks import check_hub
    from lora_serve.core.config import ModelConfig
    from lora_serve.core.settings import Settings
    from lora_serve.model.base_model import auto_class_of
    from lora_serve.model.loading.checkpoint_files import reported
    from lora_serve.model.loading.frozen_model import read_model_config
    from lora_serve.model.loading.observation import first_line
    from lora_serve.model.loading.rounded_checkpoint import PlainCheckpoint
    from lora_serve.model.pooling import loading
    from lora_serve.model.pooling.plan import plan_pooling

    try:
        check_hub(model)
    except ValueError as error:
        raise ModelError(f"MODEL {model}: it is no folder, and no hub id: {first_line(error)}") from error
    config = Settings(model=model).part(ModelConfig)
    hf_config, pooling = read_model_config(config), plan_pooling(config)
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ModelError(f"MODEL {model}: it is quantised already, says its config.json; give the plain checkpoint")
    if not Path(model).is_dir():  # all that is copied is brought into the hub's cache
        snapshot_download(model, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx*"])
    auto_class = auto_class_of(hf_config) if pooling is None else loading.auto_class_of(pooling)
    with reported(f"MODEL {model}", ModelError):
        try:
            plain = PlainCheckpoint.find(model, hf_config, auto_class, kind, group_size)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"MODEL {model}: {first_line(error)}") from error
        try:
            return plain.write(out)
        except OSError as error:
            raise ConfigError(f"OUT: {out} cannot be written: {first_line(error)}") from error
