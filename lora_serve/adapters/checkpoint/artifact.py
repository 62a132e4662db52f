"""A PEFT folder that has been checked against the base model: nothing unproven comes past this file. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from lora_serve.adapters.checkpoint.binder import bind
from lora_serve.adapters.checkpoint.bound import PREFIX, BoundAdapter, check_head
from lora_serve.adapters.checkpoint.chat_template import BaseTemplates, FoundTemplate, examine_template, read_kept
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME, AdapterContent, adapter_digest
from lora_serve.adapters.checkpoint.expert_binder import num_old_layers
from lora_serve.adapters.checkpoint.methods.vera import VeraConfig
from lora_serve.adapters.checkpoint.own_tokens import (
    BaseTokens,
    EndTokens,
    find_added_tokens,
    find_end_tokens,
    parse_added_tokens,
    read_added_tokens,
    read_end_tokens,
    write_added_tokens,
    write_end_tokens,
)
from lora_serve.adapters.checkpoint.peft_config import (
    GENERATION_TASKS,
    POOLING_TASKS,
    PeftConfig,
    parse_config,
    read_config,
)
from lora_serve.adapters.checkpoint.safetensors_header import HeaderBounds, TensorInfo, is_zero, read_header
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

T = TypeVar("T")

_TENSORS_PER_MODULE = 12  # of any method; LoKr has six at most
_TENSORS_PER_PARAMETER = 6  # its copy, the original, and a low-rank delta, each also under a second name
_OTHER_TENSORS = 64  # that belong to no module, as VeRA's
_ENTRY_BYTES = 512  # of a tensor in the header, beside its module's path
_METADATA_BYTES = 2**18
_ALONE, _WRAPPED, _WRAPPED_ONCE = "model.", "model.language_model.", "language_model.model."
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
    is_drawn = isinstance(config.method, VeraConfig) and not config.method.save_projection
    if is_drawn and any(_unmet_part(name, spec) for name in tensors):
        raise InvalidAdapterError(
            ["vera_A and vera_B were not saved, and layers that no text runs through had a part in their shapes"]
        )
    bound = _bind_to_view(spec, met, lambda view: bind(config, met, view, max_rank))
    if reasons := list(check_head(bound, spec)):
        raise InvalidAdapterError(reasons)
    return bound


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


def _bind_to_view(spec: ModelSpec, tensors: Iterable[str], bind: Callable[[ModelSpec], BoundAdapter]) -> BoundAdapter:
    """Binds to the model as it is served or, if that fails, to a view of it: the model as a trainer may have seen it,
    with modules of the tensors' names.

    Raises InvalidAdapterError: the refusal with the fewest reasons.
    """
    try:
        return bind(spec)
    except InvalidAdapterError as error:
        refusal = error
    inner = [name.removeprefix(PREFIX) for name in tensors]
    named = {name[: dot.start()] for name in inner for dot in re.finditer(r"\.", name)}  # paths of modules, and more
    for names in _views(spec):
        if named.isdisjoint(names.values()):
            continue
        try:
            return _undo_view(bind(_view(spec, names)), names)
        except InvalidAdapterError as error:
            refusal = min(refusal, error, key=lambda one: len(one.reasons))
    raise refusal


def _views(spec: ModelSpec) -> Iterator[dict[str, str]]:
    """For each view, of the modules that it has, the served model's path -> the view's."""
    if spec.pooling is None:
        yield from (names for names in _text_names(spec) if len(set(names.values())) == len(names))
        return
    prefix = spec.pooling.backbone + "."
    inside = {path: path.removeprefix(prefix) for path in _paths(spec) if path.startswith(prefix)}
    yield inside or {path: prefix + path for path in _paths(spec)}


def _text_names(spec: ModelSpec) -> Iterator[dict[str, str]]:
    """Path -> another name of each module of a language model: as checkpoints have it, alone, and in a wrapper."""
    paths = _paths(spec)
    if spec.saved_paths:
        yield {path: spec.saved_paths.get(path, path) for path in paths}
    served = _WRAPPED if any(path.startswith(_WRAPPED) for path in paths) else _ALONE
    for other, outside in ((_ALONE, ""), (_WRAPPED, ""), (_WRAPPED_ONCE, "language_model.")):
        if other != served:
            yield {p: other + p.removeprefix(served) if p.startswith(served) else outside + p for p in paths}


def _paths(spec: ModelSpec) -> frozenset[str]:
    return frozenset().union(spec.linears, spec.embeddings, spec.modules)


def _view(spec: ModelSpec, names: Mapping[str, str]) -> ModelSpec:
    return replace(
        spec,
        linears=_renamed(spec.linears, names),
        embeddings=_renamed(spec.embeddings, names),
        modules=_renamed(spec.modules, names),
        input_embedding=names.get(spec.input_embedding, ""),
        output_head=names.get(spec.output_head, ""),
    )


def _undo_view(bound: BoundAdapter, names: Mapping[str, str]) -> BoundAdapter:
    """An adapter bound to a view, by the served model's paths."""
    path_of = {name: path for path, name in names.items()}
    return replace(
        bound,
        linears=_renamed(bound.linears, path_of),
        embeddings=_renamed(bound.embeddings, path_of),
        deltas=_renamed(bound.deltas, path_of),
        tokens=_renamed(bound.tokens, path_of),
        parameters=_renamed(bound.parameters, path_of),
        conversions=None if bound.conversions is None else replace(bound.conversions, path_of=path_of),
    )


def _renamed(table: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    return {names[path]: value for path, value in table.items() if path in names}
