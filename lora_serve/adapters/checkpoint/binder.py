"""Binds an adapter's tensors to the base model, by names and shapes alone. No torch.

PEFT would make up missing weights and drop those it does not know; neither is what was trained, so both are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lora_serve.adapters.checkpoint.bound import (
    BoundAdapter,
    BoundDelta,
    BoundEmbedding,
    BoundLinear,
    BoundTokens,
    TensorPlace,
    check_resized,
    ends_of,
    labels_in,
    place_of,
    resized_to,
)
from lora_serve.adapters.checkpoint.expert_binder import FoundExperts, bind_experts
from lora_serve.adapters.checkpoint.module_patterns import ranks_and_scales
from lora_serve.adapters.checkpoint.peft_config import PeftConfig, saved_whole, targeted, targeted_parameters
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec, Shape

_FEW_REASONS = 3
_LOW_RANK = ("lora_A", "lora_B", "lora_bias", "magnitude", "embedding_A", "embedding_B")


def bind(config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> BoundAdapter:
    """Binds every tensor to its place. Raises InvalidAdapterError naming every tensor or module that does not fit."""
    experts = bind_experts(config, tensors, spec)
    binder = _Binder(config, experts, spec)
    bound = binder.bind(experts)
    if binder.reasons or not bound.modules:
        raise InvalidAdapterError(binder.causes_first() or ["it adapts no layer of the base model"])
    return bound


class _Binder:
    """Takes tensors out of `left` as they find their places; whatever stays there is refused."""

    def __init__(self, config: PeftConfig, experts: FoundExperts, spec: ModelSpec) -> None:
        self._config = config
        self._tensors = experts.rest
        self._spec = spec
        self._known_modules = frozenset().union(spec.linears, spec.embeddings, spec.modules)
        self.reasons: list[str] = list(experts.reasons)
        self._left: dict[TensorPlace, str] = {}
        self._copies: list[tuple[str, str]] = []
        self._misfits: list[tuple[Shape, Shape]] = []  # of lora_A: the file's shape, and the one asked for
        for name in self._tensors:
            self._place(name)
        self._placed = bool(self._left)
        self._vocab_size = resized_to(config, self._left, self._tensors, spec)
        self._num_labels = labels_in(self._left, self._tensors, spec)

    def bind(self, experts: FoundExperts) -> BoundAdapter:
        spec, config = self._spec, self._config
        whole = [f"{module}.{parameter}" for module, table in spec.modules.items() for parameter in table]
        parameters = targeted_parameters(config, whole)
        modules = targeted(config, (*spec.linears, *spec.embeddings.keys() - spec.linears.keys()))
        deltas, weights = self._deltas(parameters)
        embeddings = self._embeddings(modules)
        linears = self._linears(modules, weights)
        tokens = self._trained_tokens()
        own = self._own_parameters(modules)
        self._refuse_rest(frozenset().union(linears, embeddings, deltas))
        bound = BoundAdapter(
            self._with_biases(linears, own),
            embeddings,
            {**deltas, **experts.deltas},
            tokens,
            {module: table for module, table in own.items() if table},
            vocab_size=self._vocab_size,
            num_labels=self._num_labels,
            copies=tuple(self._copies),
        )
        if self._vocab_size:
            self.reasons += check_resized(bound, spec)
        if config.invocation_tokens and not bound.is_additive:
            self.reasons.append("alora_invocation_tokens: an activated LoRA may only hold plain LoRA of linear layers")
        if any(token >= (self._vocab_size or spec.vocab_size) for token in config.invocation_tokens):
            self.reasons.append("alora_invocation_tokens: a token is beyond the vocabulary, so it could never act")
        return bound

    def causes_first(self) -> list[str]:
        """The reasons, or the one cause of them all and a few of them."""
        base = self._config.base_model or "another base model"
        table = self._spec.embeddings.get(self._spec.input_embedding)
        hidden = 0 if table is None else table.embedding_dim
        widths = {found[-1] for found, wanted in self._misfits if wanted[-1] == hidden != found[-1]}
        ranks = {(found[0], wanted[0]) for found, wanted in self._misfits if found[1:] == wanted[1:]}
        if len(widths) == 1:
            cause = f"it was trained for {base} (hidden size {widths.pop()}), and this base model has {hidden}"
        elif not widths and len(ranks) == 1:
            cause = "adapter_config.json says rank {1}, and the tensors have rank {0}".format(*ranks.pop())
        elif len(self._tensors) > _FEW_REASONS and not self._placed:
            cause = f"it was trained for {base}: none of its tensors is named as a module of this base model"
        else:
            return self.reasons
        more = len(self.reasons) - _FEW_REASONS
        return [cause, *self.reasons[:_FEW_REASONS], *([f"and {more} more of the kind"] if more > 0 else [])]

    def _place(self, name: str) -> None:
        place = place_of(name)
        if place is None or place.module not in self._known_modules:
            self.reasons.append(f"tensor {name[:200]!r} belongs to no module of {self._spec.architecture}")
        elif place in self._left and place.role == "parameter":
            self._copy(self._left[place], name)  # PEFT: once as trained, once more as an embedding or for bias="all"
        elif place in self._left:
            self.reasons.append(f"tensor {name[:200]!r} is there twice under two names")
        else:
            self._left[place] = name

    def _copy(self, first: str, second: str) -> None:
        """Notes two tensors of one shape that must be equal; `model/lora/validation.py` compares their values."""
        if self._tensors[first].shape != self._tensors[second].shape:
            self.reasons.append(f"tensors {first!r} and {second[:200]!r} are one and the same to PEFT, but they differ")
        self._copies.append((first, second))

    def _take(
        self, module: str, role: str, shape: Shape, *, depth: int | None = None, parameter: str = ""
    ) -> str | None:
        """The tensor at a place, if it is there; a wrong shape is noted."""
        depths = (0, 1) if depth is None else (depth,)
        places = [TensorPlace(module, role, parameter, number) for number in depths]
        name = next((self._left.pop(place) for place in places if place in self._left), None)
        if name is not None and self._tensors[name].shape != shape:
            self._misfits += [(self._tensors[name].shape, shape)] if role == "lora_A" else []
            self.reasons.append(
                f"tensor {name!r} has shape {list(self._tensors[name].shape)}, but its rank and the base model's "
                f"layer ask for {list(shape)}"
            )
        return name

    def _need(self, module: str, role: str, shape: Shape, *, depth: int | None = None) -> str:
        name = self._take(module, role, shape, depth=depth)
        if name is None:
            self.reasons.append(f"{role} of {module} is missing")
        return name or ""

    def _refuse_rest(self, adapted: frozenset[str]) -> None:
        untargeted = {place.module for place in self._left if place.role in _LOW_RANK} - adapted
        for module in sorted(untargeted):
            self.reasons.append(f"the file has weights for {module}, but the config does not target it")
        for place, name in self._left.items():
            if place.module not in untargeted:
                self.reasons.append(f"tensor {name[:200]!r} is there, but the config does not say that it is trained")

    def _deltas(self, targets: Iterable[str]) -> tuple[dict[str, dict[str, BoundDelta]], dict[str, str]]:
        """Bare parameters; and those that are a linear layer's weight: module -> the parameter's whole path."""
        by_module: dict[str, list[str]] = {}
        for path in sorted(targets):
            by_module.setdefault(path.rpartition(".")[0], []).append(path)
        weights = {module: paths[0] for module, paths in by_module.items() if module in self._spec.linears}
        table = ranks_and_scales(self._config.ranks, [path for paths in by_module.values() for path in paths])
        found: dict[str, dict[str, BoundDelta]] = {}
        for module in by_module.keys() - weights.keys():
            # PEFT nests its wrappers in the order of the module's parameters: the last is the outermost.
            names = [name for name in self._spec.modules[module] if f"{module}.{name}" in by_module[module]]
            found[module] = {
                name: self._delta(module, name, len(names) - 1 - i, *table[f"{module}.{name}"])
                for i, name in enumerate(names)
            }
        return found, weights

    def _delta(self, module: str, parameter: str, depth: int, rank: int, scale: float) -> BoundDelta:
        *experts, num_out, num_in = self._spec.modules[module][parameter]
        num_experts = experts[0] if experts else 1
        a = self._need(module, "lora_A", (rank * num_experts, num_in), depth=depth)
        b = self._need(module, "lora_B", (num_out, rank * num_experts), depth=depth)
        return BoundDelta(a, b, rank, scale, num_experts)

    def _linears(self, targets: frozenset[str], weights: Mapping[str, str]) -> dict[str, BoundLinear]:
        """`weights`: layers whose weight `target_parameters` names, and the path that its patterns match."""
        modules = (targets & self._spec.linears.keys()) | weights.keys()
        if self._config.ensure_weight_tying and self._spec.ties_embeddings:
            head = self._spec.output_head
            modules |= {head} if TensorPlace(head, "lora_A") in self._left else set()
        paths = {module: weights.get(module, module) for module in modules}
        table = ranks_and_scales(self._config.ranks, sorted(paths.values()))
        return {module: self._linear(module, *table[paths[module]]) for module in sorted(modules)}

    def _linear(self, module: str, rank: int, scale: float) -> BoundLinear:
        shape = self._spec.linears[module]
        if not any(place.module == module for place in self._left):
            self.reasons.append(f"target_modules names {module}, but the file has no weights for it")
            return BoundLinear()
        out = (shape.out_features,)
        return BoundLinear(
            self._need(module, "lora_A", (rank, shape.in_features)),
            self._need(module, "lora_B", (shape.out_features, rank)),
            rank,
            scale,
            self._need(module, "lora_bias", out) if self._config.lora_bias else None,
            self._need(module, "magnitude", out) if self._config.use_dora else None,
        )

    def _embeddings(self, targets: frozenset[str]) -> dict[str, BoundEmbedding]:
        modules = sorted(targets & self._spec.embeddings.keys())
        table = ranks_and_scales(self._config.ranks, modules)
        return {module: self._embedding(module, *table[module]) for module in modules}

    def _embedding(self, module: str, rank: int, scale: float) -> BoundEmbedding:
        shape = self._spec.embeddings[module]
        return BoundEmbedding(
            self._need(module, "embedding_A", (rank, shape.num_embeddings)),
            self._need(module, "embedding_B", (shape.embedding_dim, rank)),
            rank,
            scale,
            self._need(module, "magnitude", (shape.embedding_dim,)) if self._config.use_dora else None,
        )

    def _trained_tokens(self) -> dict[str, BoundTokens]:
        found: dict[str, BoundTokens] = {}
        for end, ids in self._config.trained_tokens:
            module = self._embedding_named(end) if end else self._spec.input_embedding or None
            if module is None:
                self.reasons.append(f"trainable_token_indices names {end!r}, which is no embedding of the base model")
                continue
            rows, width = self._spec.modules[module]["weight"]
            if module in found and found[module].token_ids == ids:
                continue  # the output head that is tied to it
            name = self._need(module, "tokens", (len(ids), width))
            limit = self._rows(module, (rows,))[0]
            if max(ids, default=0) >= limit or len(set(ids)) < len(ids):
                self.reasons.append(f"trainable_token_indices must be different ids below {limit}")
            found[module] = BoundTokens(name, ids)
            if module == self._spec.input_embedding and self._spec.ties_embeddings:
                tied = self._take(self._spec.output_head, "tokens", (len(ids), width))
                self._copies += [] if tied is None else [(name, tied)]
        return found

    def _embedding_named(self, end: str) -> str | None:
        spec, head = self._spec, self._spec.output_head
        if head and f".{head}".endswith(f".{end}") and spec.modules[head].keys() == {"weight"}:
            return spec.input_embedding if spec.ties_embeddings else head
        found = [path for path in spec.embeddings if path == end or path.endswith(f".{end}")]
        return found[0] if len(found) == 1 else None

    def _own_parameters(self, targets: frozenset[str]) -> dict[str, dict[str, str]]:
        """module -> parameter -> tensor: modules_to_save, trained biases, and saved embeddings."""
        spec, config = self._spec, self._config
        whole = saved_whole(config, spec.modules)
        found: dict[str, dict[str, str]] = {}
        for module, table in spec.modules.items():
            for parameter, shape in table.items():
                is_bias = parameter == "bias" and (
                    config.bias == "all" or (config.bias != "none" and module in targets)
                )
                is_needed = module in whole or is_bias
                # PEFT's save_embedding_layers puts copies of the embeddings beside whatever else was trained.
                if not is_needed and module not in (spec.input_embedding, spec.output_head):
                    continue
                own_shape = self._rows(module, shape)
                if is_needed:
                    self._take(module, "original", own_shape, parameter=parameter)  # the base's: without any effect
                name = self._take(module, "parameter", own_shape, parameter=parameter)
                if name is not None:
                    found.setdefault(module, {})[parameter] = name
                elif is_needed:
                    self.reasons.append(f"{module}.{parameter} is trained, but the file does not hold it")
        if self._vocab_size and spec.ties_embeddings and config.ensure_weight_tying:
            tied = found.get(spec.input_embedding) or found.get(spec.output_head) or {}
            found = {**{module: dict(tied) for module in ends_of(spec) if tied}, **found}
        return found

    def _rows(self, module: str, shape: Shape) -> Shape:
        """`shape` with as many rows as the adapter knows tokens, where a row is a token; likewise of labels."""
        if self._num_labels and self._spec.pooling is not None and module == self._spec.pooling.label_layer:
            return (self._num_labels, *shape[1:])
        return (self._vocab_size, *shape[1:]) if self._vocab_size and module in ends_of(self._spec) else shape

    def _with_biases(self, linears: dict[str, BoundLinear], own: dict[str, dict[str, str]]) -> dict[str, BoundLinear]:
        """A linear layer's own bias goes with its delta, unless its weight is replaced too."""
        for module in self._spec.linears.keys() & own.keys():
            if "weight" not in own[module]:
                linears[module] = replace(linears.get(module, BoundLinear()), bias_name=own[module].pop("bias"))
        return linears
