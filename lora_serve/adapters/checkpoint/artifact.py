"""A PEFT folder that has been checked against the base model: nothing unproven comes past this file. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.checkpoint.added_tokens import (
    BaseTokens,
    find_added_tokens,
    parse_added_tokens,
    read_added_tokens,
    write_added_tokens,
)
from lora_serve.adapters.checkpoint.binding.binder import bind
from lora_serve.adapters.checkpoint.binding.bound import PREFIX, BoundAdapter
from lora_serve.adapters.checkpoint.binding.experts import num_old_layers
from lora_serve.adapters.checkpoint.binding.method_binder import bind_method
from lora_serve.adapters.checkpoint.binding.model_views import bind_to_view, check_head
from lora_serve.adapters.checkpoint.chat_template import (
    BaseTemplates,
    FoundTemplate,
    examine_template,
    read_kept,
    side_table,
    tokens_of,
)
from lora_serve.adapters.checkpoint.content import (
    CONFIG_NAME,
    END_TOKENS_NAME,
    GENERATION_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterContent,
    adapter_digest,
)
from lora_serve.adapters.checkpoint.peft_config import (
    GENERATION_TASKS,
    OTHER_METHODS,
    POOLING_TASKS,
    PeftConfig,
    parse_config,
    read_config,
)
from lora_serve.adapters.checkpoint.safetensors_header import HeaderBounds, TensorInfo, is_zero, read_header
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

MAX_END_TOKENS, MAX_END_WARNINGS = 64, 4


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The ids of the tokens, and a sentence for each one that cannot end anything here."""

    ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def find_end_tokens(
    folder: Path, added: Collection[AddedToken], base: BaseTokens, vocab_size: int, ends: Collection[int]
) -> EndTokens:
    """The tokens of a trainer's folder. `vocab_size`: the adapter's; `ends`: the model's own. Raises OSError."""
    table, where = side_table(folder, GENERATION_CONFIG_NAME), f"of its {GENERATION_CONFIG_NAME}"
    value = table.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    own = [number for number in listed if type(number) is int and 0 <= number < vocab_size][:MAX_END_TOKENS]
    strange = [f"The eos_token_id {str(one)[:100]} {where}" for one in listed if one not in own]
    text = tokens_of(side_table(folder, TOKENIZER_CONFIG_NAME)).get("eos_token")
    if text is not None:
        known = {token.content: token.id for token in added}
        own.append(known.get(text, base.ids.get(text, vocab_size)))
        strange += [f"The eos_token {text[:100]!r} of its {TOKENIZER_CONFIG_NAME}"] if own[-1] >= vocab_size else []
    why = "is no single token of the served vocabulary: it ends no answer."
    warnings = [f"{what} {why}" for what in strange[:MAX_END_WARNINGS]]
    if not table and (folder / GENERATION_CONFIG_NAME).is_file():
        warnings.append(f"Its {GENERATION_CONFIG_NAME} cannot be read: an eos_token_id in it ends no answer.")
    ids = {number for number in own if number < vocab_size} - {*ends, *base.ends}
    return EndTokens(tuple(sorted(ids)), tuple(warnings))


def write_end_tokens(folder: Path, found: EndTokens) -> None:
    """Writes the tokens, in one spelling, as a part of the adapter's content; no file for none. Raises OSError."""
    if found.ids:
        (folder / END_TOKENS_NAME).write_text(json.dumps({"token_ids": list(found.ids)}))


def read_end_tokens(folder: Path) -> EndTokens:
    """The tokens that a registration kept. Raises InvalidAdapterError, OSError."""
    numbers = side_table(folder, END_TOKENS_NAME).get("token_ids", [])
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise InvalidAdapterError([f"{END_TOKENS_NAME} must hold token ids"])
    return EndTokens(tuple(numbers))


_TENSORS_PER_MODULE = 12  # of any method; LoKr has six at most
_TENSORS_PER_PARAMETER = 6  # its copy, the original, and a low-rank delta, each also under a second name
_OTHER_TENSORS = 64  # that belong to no module, as VeRA's
_ENTRY_BYTES = 512  # of a tensor in the header, beside its module's path
_METADATA_BYTES = 2**18
_OF_TRAINING = (".lora_velora_embed", ".lora_monteclora_sampler.")  # what VeLoRA and MonteCLoRA train with


@dataclass(frozen=True, slots=True)
class Artifact:
    """One adapter version whose files are well formed and fit the base model."""

    digest: str
    config: PeftConfig
    tensors: Mapping[str, TensorInfo]
    bound: BoundAdapter
    added_tokens: tuple[AddedToken, ...] = ()
    template: FoundTemplate | None = None  # None: it brings no chat template, or none that is known here
    ends: EndTokens = field(default_factory=EndTokens)
    left_out: str = ""  # a sentence, if it has tensors of parts that no text runs through


def read_artifact(
    folder: Path,
    spec: ModelSpec,
    max_rank: int | None = None,
    digest: str | None = None,
    base_tokens: BaseTokens | None = None,
    base_templates: BaseTemplates | None = None,
) -> Artifact:
    """Check the folder's files and bind every tensor. `digest`: the folder's, if it is known already.

    `base_tokens`, `base_templates`: for a folder of our own that is to be registered; the tokens that a tokenizer.json
    in it adds, those that end its answers, and a chat template that is not the base's, become a part of its content.

    The values themselves are `weights.check_values`'s part. Raises InvalidAdapterError with every reason, OSError.
    """
    config, tensors = _read(folder, max_rank, spec)
    bound = _bound_to(spec, config, tensors, max_rank)
    if base_tokens is not None:
        write_added_tokens(folder, find_added_tokens(folder, bound, spec, base_tokens))
    template = read_kept(folder) if base_templates is None else examine_template(folder, base_templates)
    tokens, ends = read_added_tokens(folder), read_end_tokens(folder)
    if base_tokens is not None and spec.pooling is None:
        vocab_size = bound.vocab_size or spec.vocab_size
        ends = find_end_tokens(folder, tokens, base_tokens, vocab_size, spec.eos_token_ids)
        write_end_tokens(folder, ends)
    left_out = _left_out(folder, tensors, spec)
    return Artifact(digest or adapter_digest(folder), config, tensors, bound, tokens, template, ends, left_out)


def parse_artifact(content: AdapterContent, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> Artifact:
    """The artifact of a registered adapter's files in memory; `tensors`: the table of its weights.

    Raises InvalidAdapterError with every reason.
    """
    config = parse_config(bytes(content.config), None, _tasks(spec))
    tokens = () if content.added_tokens is None else parse_added_tokens(bytes(content.added_tokens))
    return Artifact(content.digest, config, tensors, _bound_to(spec, config, tensors, None), tokens)


def _tasks(spec: ModelSpec) -> tuple[str, ...]:
    return GENERATION_TASKS if spec.pooling is None else POOLING_TASKS


def _unmet_part(name: str, spec: ModelSpec) -> str:
    """The part of the model that no text runs through and that a tensor belongs to, under any of its names."""
    path = name.removeprefix(PREFIX).removeprefix("model.")
    return next((part for part in spec.unmet if path.startswith(part.removeprefix("model.") + ".")), "")


def _left_out(folder: Path, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> str:
    parts = {name: part for name in tensors if (part := _unmet_part(name, spec))}
    if not parts:
        return ""
    trained = [tensors[name] for name in parts if not name.endswith(("lora_A.weight", "lora_embedding_A"))]
    how = "all zero, so nothing is lost" if is_zero(folder / WEIGHTS_NAME, trained) else "not zero"
    named = ", ".join(dict.fromkeys(parts.values()))
    return f"{len(parts)} tensors of {named}, which no text runs through, were left out; what they add is {how}."


def _bound_to(
    spec: ModelSpec, config: PeftConfig, tensors: Mapping[str, TensorInfo], max_rank: int | None
) -> BoundAdapter:
    met = {
        name: info
        for name, info in tensors.items()
        if not _unmet_part(name, spec) and not any(mark in name for mark in _OF_TRAINING)
    }
    bound = bind_to_view(spec, met, functools.partial(_bound, config, met, max_rank))
    if reasons := list(check_head(bound, spec)):
        raise InvalidAdapterError(reasons)
    return bound


def _bound(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], max_rank: int | None, spec: ModelSpec
) -> BoundAdapter:
    if config.peft_type in OTHER_METHODS:
        return bind_method(config, tensors, spec, max_rank)
    return bind(config, tensors, spec)


def _read(folder: Path, max_rank: int | None, spec: ModelSpec) -> tuple[PeftConfig, Mapping[str, TensorInfo]]:
    check_files(folder)
    reasons: list[str] = []
    config = tensors = None
    try:
        config = read_config(folder / CONFIG_NAME, max_rank, _tasks(spec))
    except InvalidAdapterError as error:
        reasons += error.reasons
    try:
        tensors = read_header(folder / WEIGHTS_NAME, _header_bounds(spec))
    except InvalidAdapterError as error:
        reasons += error.reasons
    if config is None or tensors is None:
        raise InvalidAdapterError(reasons)
    return config, tensors


def _header_bounds(spec: ModelSpec) -> HeaderBounds:
    """Generous bounds, by the base model alone: a header within them is looked at name by name."""
    paths = spec.linears.keys() | spec.embeddings.keys() | spec.modules.keys()
    num_modules = len(paths) + num_old_layers(spec)
    num_parameters = sum(map(len, spec.modules.values())) + sum(spec.unmet.values())
    num_tensors = _TENSORS_PER_MODULE * num_modules + _TENSORS_PER_PARAMETER * num_parameters + _OTHER_TENSORS
    longest = max(map(len, paths), default=0)
    return HeaderBounds(num_tensors, _METADATA_BYTES + num_tensors * (longest + _ENTRY_BYTES))


def check_files(folder: Path) -> None:
    """Refuses a folder in which one of the two files is missing or not regular. Raises InvalidAdapterError."""
    reasons = [f"{name} is missing" for name in (CONFIG_NAME, WEIGHTS_NAME) if not _is_regular(folder / name)]
    if reasons and (folder / "adapter_model.bin").exists():
        reasons.append("adapter_model.bin is a pickle: save the adapter as safetensors")
    if reasons:
        raise InvalidAdapterError(reasons)


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
