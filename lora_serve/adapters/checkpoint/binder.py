"""Binds an adapter's tensors to the base model, by names and shapes alone. No torch.

PEFT would make up missing weights and drop those it does not know; neither is what was trained, so both are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lora_serve.adapters.checkpoint.bound import (
    BoundAdapter,
    BoundConversion,
    BoundDelta,
    BoundEmbedding,
    BoundLinear,
    BoundTokens,
    Conversions,
    TensorPlace,
    check_resized,
    check_tokens,
    ends_of,
    labels_in,
    place_of,
    resized_to,
    with_labels,
)
from lora_serve.adapters.checkpoint.expert_binder import FoundExperts, bind_experts
from lora_serve.adapters.checkpoint.methods import sort_tensors
from lora_serve.adapters.checkpoint.methods.factors import too_large
from lora_serve.adapters.checkpoint.module_patterns import ranks_and_scales
from lora_serve.adapters.checkpoint.peft_config import (
    OTHER_METHODS,
    PeftConfig,
    saved_whole,
    targeted,
    targeted_parameters,
)
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec, Shape

_FEW_REASONS = 3
Tensors = Mapping[str, TensorInfo]
_LOW_RANK = ("lora_A", "lora_B", "lora_bias", "magnitude", "embedding_A", "embedding_B")


def bind(config: PeftConfig, tensors: Tensors, spec: ModelSpec, max_rank: int | None = None) -> BoundAdapter:
    """Binds every tensor to its place. Raises InvalidAdapterError naming every tensor or module that does not fit.

    `max_rank`: for what is converted to LoRA (None: no limit).
    """
    if config.peft_type != "LORA":
        return _bind_method(config, tensors, spec, max_rank)
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
        self._shapes: list[tuple[Shape, Shape]] = []  # of each lora_A: the file's, and the one asked for
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
        for module in spec.linears.keys() & own.keys():
            if "weight" not in own[module]:  # a layer's own bias goes with its delta
                linears[module] = replace(linears.get(module, BoundLinear()), bias_name=own[module].pop("bias"))
        bound = BoundAdapter(
            linears,
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
        widths = {found[-1] for found, wanted in self._shapes if wanted[-1] == hidden}
        ranks = {(found[0], wanted[0]) for found, wanted in self._shapes if found[0] != wanted[0]}
        if len(widths) == 1 and hidden not in widths:
            cause = f"it was trained for {base} (hidden size {widths.pop()}), and this base model has {hidden}"
        elif len(ranks) == 1 and all(found[1:] == wanted[1:] for found, wanted in self._shapes):
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
        elif place not in self._left:
            self._left[place] = name
        elif place.role == "parameter":  # PEFT: once as trained, once more as an embedding or for bias="all"
            first = self._left[place]
            if self._tensors[first].shape != self._tensors[name].shape:
                self.reasons.append(
                    f"tensors {first!r} and {name[:200]!r} are one and the same to PEFT, but they differ"
                )
            self._copies.append((first, name))  # `model/lora/validation.py` compares their values
        else:
            self.reasons.append(f"tensor {name[:200]!r} is there twice under two names")

    def _take(
        self, module: str, role: str, shape: Shape, *, depth: int | None = None, parameter: str = ""
    ) -> str | None:
        """The tensor at a place, if it is there; a wrong shape is noted."""
        depths = (0, 1) if depth is None else (depth,)
        places = [TensorPlace(module, role, parameter, number) for number in depths]
        name = next((self._left.pop(place) for place in places if place in self._left), None)
        self._shapes += [(self._tensors[name].shape, shape)] if name is not None and role == "lora_A" else []
        if name is not None and self._tensors[name].shape != shape:
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
            is_layer = module in {**self._spec.linears, **self._spec.embeddings}
            why = "but the config does not target it" if is_layer else "which PEFT cannot run, as it is no plain layer"
            self.reasons.append(f"the file has weights for {module}, {why}")
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
        if experts and module in self._spec.transposed:
            num_in, num_out = num_out, num_in
            self.reasons += [f"PEFT adds a LoRA of {module}, a single expert, transposed"] if experts == [1] else []
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
        found = {}
        modules = sorted(targets & self._spec.embeddings.keys())
        for module, (rank, scale) in ranks_and_scales(self._config.ranks, modules).items():
            rows, width = self._spec.embeddings[module].num_embeddings, self._spec.embeddings[module].embedding_dim
            a = self._need(module, "embedding_A", (rank, rows))
            b = self._need(module, "embedding_B", (width, rank))
            magnitude = self._need(module, "magnitude", (width,)) if self._config.use_dora else None
            found[module] = BoundEmbedding(a, b, rank, scale, magnitude)
        return found

    def _trained_tokens(self) -> dict[str, BoundTokens]:
        found: dict[str, BoundTokens] = {}
        for end, ids in self._config.trained_tokens:
            module = self._embedding_named(end) if end else self._spec.input_embedding or None
            if module is None:
                self.reasons.append(f"trainable_token_indices names {end!r}, which is no embedding of the base model")
                continue
            self.reasons += check_tokens(module, self._spec)
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
            trains_bias = config.bias == "all" or (config.bias != "none" and module in targets)
            for parameter, shape in table.items():
                is_needed = module in whole or (parameter == "bias" and trains_bias)
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
        if self._vocab_size and module in ends_of(self._spec):
            shape = (self._vocab_size, *shape[1:])
        return with_labels(shape, module, self._num_labels, self._spec)


def _bind_method(config: PeftConfig, tensors: Tensors, spec: ModelSpec, max_rank: int | None) -> BoundAdapter:
    """The layers of a method other than LoRA (see `methods/`), and the modules that were saved beside them."""
    method = OTHER_METHODS[config.peft_type]
    saved, misfits = _bind_saved_modules(config, tensors, spec)
    taken = {name for table in saved.parameters.values() for name in table.values()}
    targets = {path: spec.linears[path] for path in sorted(targeted(config, tuple(spec.linears)))}
    plan = method.plan(config.method, targets)
    names, reasons = sort_tensors(method, [name for name in tensors if name not in taken], targets)
    reasons += misfits
    bound = {}
    for path, shape in targets.items():
        roles = {**names.get("", {}), **names.get(path, {})}
        shapes = {role: tensors[name].shape for role, name in roles.items()}
        rank = method.bind(plan, path, shapes, shape.in_features, shape.out_features)
        if isinstance(rank, list):
            reasons += rank
        elif problem := too_large(rank, max_rank) if max_rank is not None else "":
            reasons.append(f"{path}: {problem}")
        else:
            bound[path] = BoundConversion(roles, rank, shape)
    if reasons or not bound:
        raise InvalidAdapterError(reasons or ["it adapts no layer of the base model"])
    return replace(saved, conversions=Conversions(config.peft_type, plan, bound))


def _bind_saved_modules(config: PeftConfig, tensors: Tensors, spec: ModelSpec) -> tuple[BoundAdapter, list[str]]:
    """Every parameter of the modules that the config names; what is missing or has a wrong shape is a reason."""
    whole = saved_whole(config, spec.modules)
    places = {place: name for name in tensors if (place := place_of(name)) is not None and place.module in whole}
    num_labels = labels_in(places, tensors, spec)
    wanted = {
        TensorPlace(module, "parameter", parameter): with_labels(shape, module, num_labels, spec)
        for module in sorted(whole)
        for parameter, shape in spec.modules[module].items()
    }
    found = {place: name for place, name in places.items() if place in wanted}
    reasons = [
        f"{place.module}.{place.parameter} is trained, but the file does not hold it"
        for place in wanted.keys() - found.keys()
    ]
    reasons += [
        f"tensor {name!r} has shape {list(tensors[name].shape)}, but its module asks for {list(wanted[place])}"
        for place, name in found.items()
        if tensors[name].shape != wanted[place]
    ]
    parameters: dict[str, dict[str, str]] = {}
    for place, name in found.items():
        parameters.setdefault(place.module, {})[place.parameter] = name
    return BoundAdapter(parameters=parameters, num_labels=num_labels), reasons
