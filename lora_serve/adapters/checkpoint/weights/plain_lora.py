"""An adapter whose training began by changing the base's weights, rewritten as the plain LoRA it is to the base itself.

Once, when it is registered: from then on nothing knows of its origin but the card. The maths need the base and so are
another floor's (`Undo`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME
from lora_serve.adapters.checkpoint.peft_config import INIT_RANKS
from lora_serve.adapters.checkpoint.weights.reading import open_weights, read_weights
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.regular_file import read_regular
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.strict_json import parse_object

# (as saved, PeftConfig.init, what is called before each layer) -> against the base as it is
Undo: TypeAlias = Callable[[SavedAdapter, str, Callable[[], None]], SavedAdapter]


def convert_to_plain_lora(
    folder: Path,
    artifact: Artifact,
    spec: ModelSpec,
    undo: Undo,
    max_rank: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Artifact, dict[str, Any]]:
    """Rewrite a private folder's two files; what they are now, and what the card says of their origin.

    `check`: called at every tensor and layer; ends the work by what it raises. Raises InvalidAdapterError, OSError.
    """
    saved = undo(read_weights(folder, artifact, check=check), artifact.config.init, check)
    _replace_weights(folder, artifact.bound, saved)
    _replace_config(folder / CONFIG_NAME)
    origin = {
        "init": artifact.config.init,
        "digest": artifact.digest,
        "r": artifact.config.ranks.r,
        "base": spec.name,
    }
    return read_artifact(folder, spec, max_rank), origin


def plain_settings(table: dict[str, Any]) -> dict[str, Any]:
    """adapter_config.json's values with every rank doubled and every module's scale as it was.

    The patterns keep their order: the first that matches a module counts.
    """
    factor = math.sqrt(INIT_RANKS) if table.get("use_rslora") else INIT_RANKS  # alpha / sqrt(r), or alpha / r
    ranks, alphas = table.get("rank_pattern") or {}, table.get("alpha_pattern") or {}
    return {
        **table,
        "init_lora_weights": True,
        "r": table["r"] * INIT_RANKS,
        "lora_alpha": table["lora_alpha"] * factor,
        "rank_pattern": {name: rank * INIT_RANKS for name, rank in ranks.items()},
        "alpha_pattern": {name: alpha * factor for name, alpha in alphas.items()},
    }


def _replace_config(path: Path) -> None:
    table = parse_object(read_regular(path, MAX_CONFIG_BYTES).removeprefix(b"\xef\xbb\xbf"), path.name)
    path.unlink()  # it may be a hard link to what was sent
    path.write_text(json.dumps(plain_settings(table), ensure_ascii=False, indent=2), encoding="utf-8")


def _replace_weights(folder: Path, bound: BoundAdapter, saved: SavedAdapter) -> None:
    """New factors under their old names; whatever else was trained stays as it is."""
    factors = dict(_factors(bound, saved))
    file, written = open_weights(folder), folder / f"{WEIGHTS_NAME}.new"
    tensors = {name: factors[name] if name in factors else file.get_tensor(name) for name in file.tensors}
    save_file(tensors, written, metadata={"format": "pt"})
    written.replace(folder / WEIGHTS_NAME)


def _factors(bound: BoundAdapter, saved: SavedAdapter) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor as PEFT lays it out)."""
    for path, linear in saved.linears.items():
        names = bound.linears[path]
        if linear.a is not None and linear.b is not None and names.a_name and names.b_name:
            yield names.a_name, linear.a.contiguous()
            yield names.b_name, linear.b.t().contiguous()
    for path, embedding in saved.embeddings.items():
        yield bound.embeddings[path].a_name, embedding.a.t().contiguous()
        yield bound.embeddings[path].b_name, embedding.b.t().contiguous()
