"""An adapter bound to the base model: every tensor has exactly one place there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.checkpoint.methods import GAIN_METHODS
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.model_spec import LinearShape, ModelSpec, Shape

MAX_LABELS = 65536  # the logits of a whole step become as wide as its largest head
MAX_GROWTH = 65536  # rows beyond the base's: the logits of a whole step become as wide as its largest vocabulary
PREFIX = "base_model.model."
_ADAPTER = r"(?:\.default)?"  # older files keep the adapter's name inside
_ROLES = tuple(
    (role, re.compile(rf"(?P<module>.+)\.{pattern}\Z"))
    for role, pattern in (
        ("lora_A", rf"lora_A{_ADAPTER}\.weight"),
        ("lora_B", rf"lora_B{_ADAPTER}\.weight"),
        ("lora_bias", rf"lora_B{_ADAPTER}\.bias"),
        ("magnitude", rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?"),
        ("embedding_A", rf"lora_embedding_A{_ADAPTER}"),
        ("embedding_B", rf"lora_embedding_B{_ADAPTER}"),
        ("tokens", rf"token_adapter\.trainable_tokens_delta{_ADAPTER}"),
    )
)
_INNER = r"(?P<inner>(?:\.[^.]+)*)"  # inside a module that was trained whole, such as a head of two layers
_PARAMETER = re.compile(rf"(?P<module>.+?)(?:\.modules_to_save{_ADAPTER}{_INNER})?\.(?P<parameter>[^.]+)\Z")
_ORIGINAL = re.compile(rf"(?P<module>.+)\.original_module{_INNER}\.(?P<parameter>[^.]+)\Z")
_WRAPPER = ".base_layer"
_TOKENS_WRAPPER = ".token_adapter.base_layer"


@dataclass(frozen=True, slots=True)
class BoundLinear:
    """One adapted linear layer, as the names of its tensors; `weights.saved.SavedLinear` says what they mean."""

    a_name: str | None = None  # [rank, in_features]; None: only the bias is trained
    b_name: str | None = None  # [out_features, rank]
    rank: int = 0
    scale: float = 0.0
    lora_bias_name: str | None = None  # [out_features], beside lora_B
    magnitude_name: str | None = None  # [out_features], DoRA's
    bias_name: str | None = None  # [out_features], in place of the layer's own


@dataclass(frozen=True, slots=True)
class BoundEmbedding:
    """One adapted embedding table."""

    a_name: str  # [rank, num_embeddings]
    b_name: str  # [embedding_dim, rank]
    rank: int
    scale: float
    magnitude_name: str | None = None  # [embedding_dim], DoRA's


@dataclass(frozen=True, slots=True)
class BoundDelta:
    """A low-rank delta of a bare parameter: a matrix [out, in], or one per expert, [num_experts, out, in] or, where
    `ModelSpec.transposed` names the module, [num_experts, in, out].
    """

    a_name: str  # [rank * num_experts, in]
    b_name: str  # [out, rank * num_experts]
    rank: int
    scale: float
    num_experts: int


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """A low-rank delta of stacked weights [num_experts, num_parts * out, in], saved as a LoRA per expert and part."""

    parts: tuple[Mapping[int, BoundLinear], ...]  # as they are stacked along the outputs; expert -> its factors
    num_experts: int
    shape: LinearShape  # of one part of one expert

    @property
    def rank(self) -> int:
        """The rank of the whole delta: the sum of its parts' ranks."""
        return sum(max((linear.rank for linear in part.values()), default=0) for part in self.parts)

    @property
    def scale(self) -> float:
        """The scale of one of the parts."""
        return next((linear.scale for part in self.parts for linear in part.values() if linear.scale), 0.0)


@dataclass(frozen=True, slots=True)
class BoundTokens:
    """Trained rows of an embedding table (and of the output head tied to it)."""

    name: str  # [num_tokens, embedding_dim]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundConversion:
    """One linear layer of a method other than LoRA, which is converted when it is read."""

    names: Mapping[str, str]  # role -> tensor, as the method calls them; the model's own roles among them
    rank: int  # of the exact factors; 0: there are none, but gains
    shape: LinearShape


@dataclass(frozen=True, slots=True)
class Conversions:
    """All of an adapter's layers of a method other than LoRA (see `methods/`)."""

    peft_type: str
    plan: Any  # the method's own
    modules: Mapping[str, BoundConversion]
    path_of: Mapping[str, str] = field(default_factory=dict)  # where a module lies if `modules` calls it otherwise


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """All changes that an adapter makes, by module path."""

    linears: Mapping[str, BoundLinear] = field(default_factory=dict)
    embeddings: Mapping[str, BoundEmbedding] = field(default_factory=dict)
    deltas: Mapping[str, Mapping[str, BoundDelta | BoundExperts]] = field(default_factory=dict)  # module -> parameter
    tokens: Mapping[str, BoundTokens] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # module -> parameter -> tensor name
    conversions: Conversions | None = None
    vocab_size: int = 0  # of its own embedding and output head; 0: the base's
    num_labels: int = 0  # of its own classification head; 0: it has none
    copies: tuple[tuple[str, str], ...] = ()  # tensors that the file holds twice, under two names

    @property
    def modules(self) -> frozenset[str]:
        """The paths of all modules that the adapter changes."""
        names = self.conversions
        converted = () if names is None else [names.path_of.get(path, path) for path in names.modules]
        return frozenset().union(self.linears, self.embeddings, self.deltas, self.tokens, self.parameters, converted)

    @property
    def is_additive(self) -> bool:
        """True if the adapter only adds low-rank deltas, so that several such adapters can be summed with scales."""
        plain = all(b.magnitude_name is None and b.bias_name is None for b in self.linears.values())
        plain = plain and all(b.magnitude_name is None for b in self.embeddings.values())
        gains = self.conversions is not None and self.conversions.peft_type in GAIN_METHODS
        return plain and not (self.deltas or self.tokens or self.parameters or gains or self.vocab_size)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor belongs. `depth` counts the wrappers (".base_layer") that PEFT put around the module."""

    module: str
    role: str  # one of _ROLES, "parameter": it replaces the module's own, or "original": it is what was replaced
    parameter: str = ""
    depth: int = 0


def place_of(name: str) -> TensorPlace | None:
    """The place of the tensor `name`; None: nothing PEFT would write."""
    path = name.removeprefix(PREFIX)
    for role, pattern in _ROLES:
        match = pattern.match(path)
        if match is not None:
            return _place(match["module"], role)
    match = _ORIGINAL.match(path)
    if match is not None:
        return _place(match["module"] + match["inner"], "original", match["parameter"])
    match = _PARAMETER.match(path)
    return (
        None
        if match is None or "lora_" in match["parameter"]
        else _place(match["module"] + (match["inner"] or ""), "parameter", match["parameter"])
    )


def _place(module: str, role: str, parameter: str = "") -> TensorPlace:
    module = module.removesuffix(_TOKENS_WRAPPER)
    return TensorPlace(module.replace(_WRAPPER, ""), role, parameter, module.count(_WRAPPER))


def ends_of(spec: ModelSpec) -> tuple[str, str]:
    """The modules that have a row for every token: input embedding and output head."""
    return spec.input_embedding, spec.output_head


def resized_to(
    config: PeftConfig, places: Mapping[TensorPlace, str], tensors: Mapping[str, TensorInfo], spec: ModelSpec
) -> int:
    """The size of the vocabulary of the adapter's model; 0: the base's."""
    if not all(ends_of(spec)):
        return 0
    sizes = {
        tensors[name].shape[0]
        for place, name in places.items()
        if place.role == "parameter" and place.parameter == "weight" and place.module in ends_of(spec)
        if tensors[name].shape
    } - {spec.vocab_size}
    if sizes:
        return max(sizes)
    newest = max((token for _, ids in config.trained_tokens for token in ids), default=0)
    return newest + 1 if newest >= spec.vocab_size else 0


def check_tokens(module: str, spec: ModelSpec) -> Iterator[str]:
    """Reasons why trained tokens of an embedding, or of a head, cannot be served as PEFT computes them."""
    if module in spec.embeddings and spec.embeddings[module].scale is None:
        yield f"trainable_token_indices: PEFT leaves out what {module} does beside its lookup"
    if module == spec.input_embedding and spec.ties_embeddings and "bias" in spec.modules[spec.output_head]:
        yield "trainable_token_indices: PEFT leaves out the bias of the tied output head"


def check_resized(bound: BoundAdapter, spec: ModelSpec) -> Iterator[str]:
    """Reasons why an adapter with a vocabulary of its own cannot be served."""
    size, (embedding, head) = bound.vocab_size, ends_of(spec)
    rows = {spec.embeddings[embedding].num_embeddings, spec.linears[head].out_features if head in spec.linears else 0}
    if rows != {spec.vocab_size} or spec.embeddings[embedding].scale is None:
        yield f"its vocabulary has {size} tokens, and this base model's cannot be resized"
    if size > spec.vocab_size + MAX_GROWTH:
        yield f"its vocabulary has {size} tokens, more than {MAX_GROWTH} above the base model's {spec.vocab_size}"
        return  # what is missing of so many is not even counted
    for module in ends_of(spec):
        if module in bound.linears or module in bound.embeddings or module in bound.deltas:
            yield (
                f"its vocabulary has {size} tokens, the base model's {spec.vocab_size}: a low-rank delta or a bias "
                f"of {module} cannot go with that; train it by modules_to_save or trainable_token_indices"
            )
        if missing := _missing(bound, spec, module):
            yield missing


def _missing(bound: BoundAdapter, spec: ModelSpec, module: str) -> str | None:
    """The rows of `module` for new tokens that the file does not hold."""
    own = bound.parameters.get(module, {})
    if "weight" in own:
        lacks_bias = "bias" in spec.modules[module] and "bias" not in own
        return f"{module}.weight is resized, but the file does not hold its bias" if lacks_bias else None
    tokens = bound.tokens.get(spec.input_embedding if spec.ties_embeddings else module)
    new = set(range(spec.vocab_size, bound.vocab_size)) - set(() if tokens is None else tokens.token_ids)
    if not new:
        return None
    return (
        f"the file holds no row of {module} for the new tokens {min(new)} to {max(new)}: save the adapter with "
        "save_embedding_layers=True"
    )


def labels_in(places: Mapping[TensorPlace, str], tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> int:
    """The number of labels of the adapter's own label layer; 0: it has none."""
    if spec.pooling is None or not spec.pooling.label_layer:
        return 0
    name = places.get(TensorPlace(spec.pooling.label_layer, "parameter", "weight"))
    shape = tensors[name].shape if name is not None else ()
    return shape[0] if shape else 0


def with_labels(shape: Shape, module: str, num_labels: int, spec: ModelSpec) -> Shape:
    """`shape`, in the label layer with as many rows as the adapter has labels of its own."""
    is_label_layer = spec.pooling is not None and module == spec.pooling.label_layer
    return (num_labels, *shape[1:]) if num_labels and is_label_layer else shape


def check_head(bound: BoundAdapter, spec: ModelSpec) -> Iterator[str]:
    """Reasons to refuse an adapter whose head would be untrained, or too large to be served."""
    if bound.num_labels > MAX_LABELS:
        yield f"its head has {bound.num_labels} labels, more than {MAX_LABELS}"
    for module in () if spec.pooling is None else spec.pooling.untrained:
        if spec.modules.get(module, {}).keys() - bound.parameters.get(module, {}).keys():
            yield f"the base model's checkpoint has no weights for {module}, so the adapter must bring them whole"
