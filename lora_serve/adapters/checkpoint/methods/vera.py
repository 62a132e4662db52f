"""VeRA: one frozen random pair A, B for all layers, two trained vectors per layer (Kopiczko et al.,
https://arxiv.org/abs/2310.11454).

delta_W = diag(lambda_b) B[:out] diag(lambda_d) A[:, :in], with lambda_d [r], lambda_b [out], A [r, largest in] and
B [largest out, r]: a LoRA of rank r whose A is lambda_d * A[:, :in] and whose B is lambda_b * B[:out], at scale 1.
A and B are saved once for the model, or not at all (save_projection false): see saved.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.checkpoint.methods.factors import Arrays, Factors, Shapes, misfits, rounded, wide
from lora_serve.adapters.checkpoint.peft_fields import MethodFields, words
from lora_serve.core.model_spec import LinearShape

PEFT_TYPE = "VERA"
HARMLESS = words("d_initial fan_in_fan_out init_weights vera_dropout")
UNDERSTOOD = words("projection_prng_key r save_projection")
ROLES = re.compile(
    r"(?:base_model\.(?=vera_[AB])|(?:base_model\.model\.)?(?P<module>.+)\.(?=vera_lambda))"
    r"(?P<role>vera_[AB]|vera_lambda_[bd])(?:\.default)?\Z"
)


@dataclass(frozen=True, slots=True)
class VeraConfig:
    r: int
    projection_prng_key: int
    save_projection: bool


@dataclass(frozen=True, slots=True)
class VeraPlan:
    """Shared A is [r, in_features], shared B [out_features, r]: the largest of any targeted layer."""

    config: VeraConfig
    in_features: int
    out_features: int


def parse(table: Mapping[str, Any]) -> VeraConfig:
    settings = MethodFields(table, PEFT_TYPE, HARMLESS | UNDERSTOOD)
    config = VeraConfig(
        r=settings.rank("r"),
        projection_prng_key=settings.integer("projection_prng_key"),
        save_projection=settings.flag("save_projection", default=True),
    )
    settings.require(abs(config.projection_prng_key) < 2**63, "projection_prng_key must fit into 64 bits")
    settings.finish()
    return config


def plan(config: VeraConfig, targets: Mapping[str, LinearShape]) -> VeraPlan:
    """`targets`: every linear layer that the config targets, not only those with tensors."""
    shapes = targets.values()
    largest_in = max((shape.in_features for shape in shapes), default=0)
    return VeraPlan(config, largest_in, max((shape.out_features for shape in shapes), default=0))


def bind(plan: VeraPlan, module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
    """`shapes` holds the module's own roles and, if they were saved, the shared vera_A and vera_B."""
    r = plan.config.r
    expected: dict[str, tuple[int, ...]] = {"vera_lambda_b": (out_features,), "vera_lambda_d": (r,)}
    if plan.config.save_projection:  # larger: those of a vision tower, say, have a part in them
        widest = max(plan.in_features, *shapes.get("vera_A", ())[1:], 0)
        tallest = max(plan.out_features, *shapes.get("vera_B", ())[:1], 0)
        expected |= {"vera_A": (r, widest), "vera_B": (tallest, r)}
    elif shapes.keys() & {"vera_A", "vera_B"}:
        # PEFT would ignore them and draw its own.
        return ["vera_A and vera_B are saved, but save_projection is false: which are meant is unclear"]
    return misfits(module, shapes, expected) or r


def factors(plan: VeraPlan, module: str, tensors: Arrays, in_features: int, out_features: int) -> Factors:
    """`tensors` holds the module's own and the shared vera_A and vera_B, saved or drawn again."""
    own = wide({role: tensors[role] for role in ("vera_lambda_b", "vera_lambda_d")})
    a = own["vera_lambda_d"][:, None] * tensors["vera_A"][:, :in_features]
    b = own["vera_lambda_b"] * tensors["vera_B"][:out_features].T
    return rounded(a, b, 1.0, module)
