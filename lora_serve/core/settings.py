"""Settings: resolved once from flags, environment (LORA_SERVE_X) and YAML, then frozen and handed on in slices.

Names are vLLM's where it has one. `load_settings` is the only door; a wrong value is a ConfigError that names
the flag, the value and what is allowed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import yaml
from pydantic import ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.flags import FlagParser, default_on_cuda, flag_name
from lora_serve.core.gguf_file import gguf_of
from lora_serve.core.setting_groups.adapters import AdapterTierSettings, RegistrySettings
from lora_serve.core.setting_groups.engine import BatchSettings, EngineSettings, KVCacheSettings
from lora_serve.core.setting_groups.http import (
    AccessSettings,
    BrowserSettings,
    ConnectionLimits,
    GrammarConfig,
    RequestLimits,
    TlsConfig,
)
from lora_serve.core.setting_groups.model import ServedModelSettings, is_there
from lora_serve.core.setting_groups.operation import (
    AccountingConfig,
    FleetSettings,
    ObservabilitySettings,
    OperationSettings,
)
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.core.setting_texts import check_text
from lora_serve.core.setting_types import changed_flags, parse_count, part_of
from lora_serve.core.vllm_flags import VLLM_KEYS, add_vllm_flags, as_vllm_reads, parsed_keys, taken

_HUB_ID = re.compile(r"(?=.{1,200}\Z)[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
T = TypeVar("T")
_MAX_MESSAGE = 400  # characters of what is said of one value
MAX_FILE_BYTES = 2**20
VLLM_KEY_VARIABLE = "VLLM_API_KEY"  # what vLLM reads where no --api-key is given
SECRETS = ("admin_key", "api_key", "redis_url", "otlp_traces_endpoint", "overflow", "overflow_api_key")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings(
    # The last base's fields come first in --help.
    OperationSettings,
    ObservabilitySettings,
    ConnectionLimits,
    TlsConfig,
    GrammarConfig,
    RequestLimits,
    AccountingConfig,
    OverflowConfig,
    BrowserSettings,
    AccessSettings,
    FleetSettings,
    EngineSettings,
    RegistrySettings,
    KVCacheSettings,
    AdapterTierSettings,
    BatchSettings,
    ServedModelSettings,
):
    """Every setting of `lora-serve serve`; field names are flag names with underscores."""

    if TYPE_CHECKING:
        model_fields: ClassVar[dict[str, FieldInfo]]  # by name, in the order of --help

        def __init__(self, **given: Any) -> None:
            """Raises ValidationError."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Runs before a value is understood as a number, a path or one of some words; a default is as it is."""
        is_default = info.field_name is not None and value == cls.model_fields[info.field_name].default
        return value if is_default else check_text(value)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.check_name_on_the_wire()
        self.check_replicas()
        self.check_keys_together()
        self.check_overflow_together()
        self.check_tls_together()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): each running row takes one token per step"
            )
        if self.engine != "ray" and (flags := changed_flags(self, FleetSettings)):
            raise ValueError(
                f"{', '.join(flags)}: only for a fleet: give --engine ray, or begin with `lora-serve fleet`"
            )
        return self

    def part(self, kind: type[T]) -> T:
        """The settings that a part of the program takes: a group, or several as in `core/config.py`."""
        return part_of(self, kind)

    def fleet_slice(self) -> FleetConfig:
        least, most = self.replica_range
        num_gpus = float(self.device == "cuda") if self.num_gpus is None else self.num_gpus
        return FleetConfig(
            min_replicas=least,
            max_replicas=most,
            num_gpus=num_gpus,
            num_cpus=self.cpus_per_replica or float(max(1, len(os.sched_getaffinity(0)) // most)),
            address=None if self.ray_address == "none" else self.ray_address,
            name=self.fleet_name,
            wait=self.fleet_wait,
            router=self.router,
        )


Settings.model_fields = Settings.__pydantic_fields__  # type: ignore[attr-defined]


def load_settings(arguments: list[str]) -> Settings:
    """Read flags (`arguments`, without the program's name), environment and `--config FILE.yaml`.

    Raises ConfigError with one line per wrong setting: the flag, the value, what is allowed.
    `--help` prints every flag and exits with 0, as argparse does.
    """
    return command_line(arguments)[0]


def command_line(arguments: list[str]) -> tuple[Settings, tuple[str, ...]]:
    """The settings, as `load_settings` reads them, and a line about each of vLLM's flags that means nothing here,
    and about its variable VLLM_API_KEY.
    """
    parser = settings_parser("lora-serve serve", "Start the server. Takes the flags of `vllm serve` too.")
    add_vllm_flags(parser)
    flags, notes = taken(parser.values(as_vllm_reads(arguments)))
    settings, more = _resolve(flags)
    return settings, (*notes, *more)


def settings_parser(program: str, description: str) -> FlagParser:
    """A parser that knows a flag for every setting."""
    note = " Every flag is also an environment variable (LORA_SERVE_MAX_LORAS) and a key of --config's YAML file."
    return FlagParser(program, description + note, Settings.model_fields)


def resolve_settings(flags: dict[str, Any]) -> Settings:
    """Settings from flags over environment over the YAML file. Raises ConfigError."""
    return _resolve(flags)[0]


def _resolve(flags: dict[str, Any]) -> tuple[Settings, tuple[str, ...]]:
    environment = {key.upper(): value for key, value in os.environ.items() if value}
    variables = {name: f"LORA_SERVE_{name.upper()}" for name in Settings.model_fields}
    from_environment: dict[str, Any] = {name: environment[key] for name, key in variables.items() if key in environment}
    file = flags.get("config") or from_environment.get("config")
    content = _read_file(Path(file), {*Settings.model_fields, *VLLM_KEYS}) if file else {}
    from_file, notes = taken(parsed_keys(content))
    key = environment.get(VLLM_KEY_VARIABLE)
    if key and not any("api_key" in given for given in (from_file, from_environment, flags)):
        from_environment["api_key"], variables["api_key"] = (key,), VLLM_KEY_VARIABLE
        notes = (*notes, f"{VLLM_KEY_VARIABLE} is taken as --api-key")
    if "overflow" not in from_file | from_environment | flags:
        from_environment.pop("overflow_api_key", None)  # a key turns nothing on, and several servers may have one file
    given = from_file | from_environment | flags
    try:
        settings = Settings(**defaults_on_device(given) | given)
    except ValidationError as error:
        origins = dict.fromkeys(from_file, f"in {file}") | {name: f"in {variables[name]}" for name in from_environment}
        raise ConfigError(describe(error, {name: origins[name] for name in origins if name not in flags})) from None
    check_folders(settings)
    return settings, notes


def defaults_on_device(given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a server on a GPU, by name, if that is where the model will run; else none."""
    device = given.get("device", "auto")
    if device != "cuda" and not (device == "auto" and has_cuda()):
        return {}
    found = {name: default_on_cuda(field) for name, field in Settings.model_fields.items()}
    found = {name: value for name, value in found.items() if value is not None}
    with suppress(KeyError, TypeError, ValueError):  # what is no number is refused later
        found["max_num_seqs"] = min(found["max_num_seqs"], int(parse_count(given["max_num_batched_tokens"])))
    return found


def has_cuda() -> bool:
    """True if torch is built for CUDA and NVIDIA's driver names a GPU, as `torch.cuda.is_available` finds.

    torch is not imported: with the engine in another process, the server never needs it.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        built_for = re.search(r"^cuda\b.*= *'", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
        driver = ctypes.CDLL("libnvidia-ml.so.1") if built_for else None
    except OSError:
        return False
    count = ctypes.c_uint()
    if driver is None or driver.nvmlInit_v2() != 0 or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return False
    return count.value > 0


def _read_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Field name -> value. Raises ConfigError if the file is missing, is not such a mapping, or names no setting."""
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_FILE_BYTES):
            raise ConfigError(f"--config: {path} is no file of at most {MAX_FILE_BYTES} bytes")
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a mapping such as `max-num-seqs: 64`")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known or name == "config":
            raise ConfigError(f"--config: {path}: there is no setting {str(key)[:64]!r}")
        # YAML 1.1 reads a bare on or off as a boolean; settings that are booleans take the words as well.
        values[name] = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return values


def describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line per wrong setting; `origins` says where a value that is not a flag's came from."""
    return "\n".join(_describe_one(item, origins) for item in error.errors(include_url=False))


def _describe_one(item: ErrorDetails, origins: Mapping[str, str]) -> str:
    message = (
        item["msg"]
        .removeprefix("Value error, ")
        .replace("Unexpected keyword argument", "Extra inputs are not permitted")
    )
    message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
    if not item["loc"]:  # of several settings together
        found = [name for name in origins if re.search(rf"{flag_name(name)}(?![\w-])", message)]
        return message + "".join(f"; {flag_name(name)} is {origins[name]}" for name in found)
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{flag_name(name)}: is required ({Settings.model_fields[name].description})"
    origin = f" {origins[name]}" if name in origins else ""
    got = "a value that is not shown" if name in SECRETS else repr(item["input"])[:200]
    return f"{flag_name(name)}: {message} (got {got}{origin})"


def check_folders(settings: Settings) -> None:
    """Refuse folders that are not there before anything heavy is imported. Raises ConfigError."""
    model = Path(settings.model)
    if gguf_of(settings.model) is not None:
        pass
    elif is_there(model.is_dir):
        if not is_there((model / "config.json").is_file):
            raise ConfigError(f"--model: {_shown(settings.model)} holds no config.json, so it is not a model folder")
    elif (
        is_there(model.exists)
        or not _HUB_ID.fullmatch(settings.model)
        or ("/" in settings.model and is_there(model.parent.is_dir))
    ):
        raise ConfigError(
            f"--model: {_shown(settings.model)} is neither a folder, a GGUF file nor a hub id such as org/name"
        )
    template = settings.chat_template
    if template is not None and "{" not in template and not is_there(Path(template).is_file):
        raise ConfigError(f"--chat-template: {_shown(template)} is neither a file nor a template")
    for root in settings.adapter_root:
        if not is_there(root.is_dir):
            raise ConfigError(f"--adapter-root: {_shown(root)} is not a folder")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(settings, name)
        if file is not None and not is_there(file.is_file):
            raise ConfigError(f"{flag_name(name)}: {_shown(file)} is not a file")
    for item in settings.lora_modules:
        path = item.partition("=")[2]
        if "://" not in path and not is_there(Path(path).is_dir):
            hint = f"; on the hub it is hf://{path}" if "/" in path and _HUB_ID.fullmatch(path) else ""
            raise ConfigError(f"--lora-modules: {_shown(path)} is not a folder (got {_shown(item)}){hint}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
