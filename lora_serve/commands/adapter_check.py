"""`lora-serve check`: an adapter against a base model, with no server running."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lora_serve.adapters.checkpoint.artifact import Artifact, read_artifact
from lora_serve.adapters.checkpoint.bound import BoundAdapter
from lora_serve.adapters.checkpoint.chat_template import FoundTemplate
from lora_serve.adapters.checkpoint.content import SIDE_NAMES
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.checkpoint.weights import convert_to_plain_lora, read_weights
from lora_serve.adapters.registration.verification import (
    base_warnings,
    check_smoke_test,
    kinds_of,
    origin_of,
    refusal_of_errors,
    smoke_test_prompt,
    token_warnings,
    traits_of,
)
from lora_serve.adapters.sources.folder import copy_files
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import RowAdapter, SlotRef
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, InvalidAdapterError, PayloadTooLargeError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.settings import Settings
from lora_serve.logs import configure_logging
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.exactness import try_base
from lora_serve.model.lora.validation import check_values
from lora_serve.model.pooling.plan import plan_pooling
from lora_serve.text.adapter_template import TemplateProcesses, base_templates
from lora_serve.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome that a registration of the adapter would have on a server with these settings."""

    reasons: tuple[str, ...]  # of a refusal; empty: it would be accepted
    artifact: Artifact | None = None  # None: its files could not be read
    smoke_test: SmokeTestResult | None = None
    num_bytes: int = 0  # of host memory
    warnings: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)  # what it was converted from (`plain_lora`)


def run(folder: Path, settings: Settings) -> int:
    """Prints verdict, modules and smoke test; returns the exit code. Raises ConfigError, ModelError."""
    configure_logging(settings.log_format, level=logging.WARNING)
    verdict = check_adapter(
        folder, settings, build_model(settings.part(ModelConfig), settings.part(EngineConfig), num_slots=1)
    )
    _print(folder, verdict, Console(highlight=False, soft_wrap=True), settings.adapter_chat_templates)
    return 1 if verdict.reasons else 0


def run_base(settings: Settings) -> int:
    """Prints what can be known of the base model without its weights. Raises ConfigError, ModelError."""
    configure_logging(settings.log_format, level=logging.WARNING)
    config = settings.part(ModelConfig)
    if (pooling := plan_pooling(config)) is not None:
        raise ConfigError(f"--base: {config.model} is a model for {pooling.task}, of which its start alone tells more")
    found = try_base(config)
    names = sorted({path.rpartition(".")[2] for path in found.spec.linears})
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"linear layers that adapters can be of: {', '.join(names)}", markup=False)
    tables = [(path.rpartition(".")[2], table) for path, table in found.spec.modules.items()]
    if stacks := sorted({f"{name}.{part}" for name, table in tables for part in table if len(table[part]) == 3}):
        console.print(f"stacks of experts, as `target_parameters` names them: {', '.join(stacks)}", markup=False)
    console.print(
        f"{config.model}: can be served, as far as a small copy of its {found.spec.architecture} tells; the start "
        "compares its weights, too",
        markup=False,
    )
    return 0


def check_adapter(folder: Path, settings: Settings, parts: ModelParts) -> Verdict:
    """Checks the adapter as a registration does, without storing it."""
    artifact, origin, rank = None, dict[str, Any](), settings.max_lora_rank
    try:
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            copy_files(folder, copy, settings.max_upload_size, None)
            artifact = _read(copy, settings, parts)
            check_values(copy, artifact)
            if artifact.config.init:
                convert_to_plain_lora(copy, artifact, parts.undo)
                origin, plain = origin_of(artifact, parts.spec), read_artifact(copy, parts.spec, rank)
                artifact = replace(plain, template=artifact.template, ends=artifact.ends)
            tested, num_bytes = _try(copy, artifact, parts, rank)
        warnings = base_warnings(artifact.config.base_model, (parts.spec.name, settings.base_name))
        check_smoke_test(tested)
    except InvalidAdapterError as error:
        return Verdict(tuple(error.reasons), artifact, origin=origin)
    except (AdapterUnavailableError, PayloadTooLargeError) as error:
        return Verdict((str(error),))
    except OSError as error:
        return Verdict((f"{folder} cannot be read: {error.strerror}",))
    return Verdict((), artifact, tested, num_bytes, (*warnings, *token_warnings(artifact)), origin)


def _read(folder: Path, settings: Settings, parts: ModelParts) -> Artifact:
    """The artifact of a private copy, as a registration reads it. Raises InvalidAdapterError, OSError."""
    if not any((folder / name).is_file() for name in SIDE_NAMES):
        return read_artifact(folder, parts.spec, settings.max_lora_rank)
    text = TextModel.load(settings.model)
    with closing(TemplateProcesses(1)) as processes:
        templates = base_templates(text, parts.spec, processes, settings.adapter_chat_templates)
        tokens = BaseTokens(text.vocabulary(), text.eos_token_ids)
        return read_artifact(folder, parts.spec, settings.max_lora_rank, base_tokens=tokens, base_templates=templates)


def _try(folder: Path, artifact: Artifact, parts: ModelParts, max_rank: int) -> tuple[SmokeTestResult, int]:
    host = parts.fold(read_weights(folder, artifact, max_rank=max_rank))
    traits = traits_of(artifact, parts.spec)
    ref = AdapterRef("", folder.name, 1, artifact.digest, host.rank, host.num_bytes, traits)
    slot = SlotRef(0, 1, ref.digest)
    tokens = smoke_test_prompt(artifact.config, parts.spec, traits.vocab_size)
    parts.runner.load_slot(slot, host)
    with refusal_of_errors(ref.label):
        return parts.runner.smoke_test(RowAdapter(slot, start=ref.start_in(tokens) or 0), tokens), host.num_bytes


def _print(folder: Path, verdict: Verdict, console: Console, rule: str) -> None:
    if verdict.artifact is not None:
        console.print(_modules(verdict.artifact.bound))
        console.print(f"kinds: {', '.join(kinds_of(verdict.artifact)) or 'plain LoRA'}", markup=False)
        if verdict.origin:
            init, rank = verdict.origin["init"], verdict.origin["r"]
            console.print(f"converted: from {init} of rank {rank} to plain LoRA of twice the rank", markup=False)
        if verdict.artifact.ends.ids:
            console.print(f"ends its answers, too: {', '.join(map(str, verdict.artifact.ends.ids))} (token ids)")
        if verdict.artifact.template is not None:
            console.print(f"chat template: {_template_text(verdict.artifact.template, rule)}", markup=False)
        console.print(f"digest: {verdict.artifact.digest}", markup=False)
    if verdict.smoke_test is not None:
        change, scale = verdict.smoke_test.logit_change, verdict.smoke_test.logit_scale
        console.print(f"host memory: {verdict.num_bytes} bytes")
        console.print(f"probe: it changes a logit by up to {change:.4g} (the largest logit is {scale:.4g})")
    for text in (*(f"warning: {warning}" for warning in verdict.warnings), *verdict.reasons):
        console.print(text, markup=False)
    num = len(verdict.reasons)
    console.print(f"{folder}: {num} reason(s) to reject it" if num else f"{folder}: can be served", markup=False)


def _template_text(found: FoundTemplate, rule: str) -> str:
    if not found.differs:
        return "the base model's own"
    used = {"admin": "used if the admin key registers it", "tenant": "used", "off": "not used"}[rule]
    return f"differs from the base model's; {used} (--adapter-chat-templates {rule})"


def _modules(bound: BoundAdapter) -> Table:
    table = Table("module", "what", "rank", "scale", box=None, pad_edge=False)
    for path, linear in bound.linears.items():
        marks = {"lora": linear.a_name, "dora": linear.magnitude_name, "lora_bias": linear.lora_bias_name}
        marks["bias"] = linear.bias_name
        table.add_row(
            path, "+".join(mark for mark, name in marks.items() if name), str(linear.rank), f"{linear.scale:g}"
        )
    for path, embedding in bound.embeddings.items():
        what = "lora" if embedding.magnitude_name is None else "lora+dora"
        table.add_row(path, what, str(embedding.rank), f"{embedding.scale:g}")
    for path, deltas in bound.deltas.items():
        for name, delta in deltas.items():
            table.add_row(f"{path}.{name}", f"lora of {delta.num_experts}", str(delta.rank), f"{delta.scale:g}")
    if bound.conversions is not None:
        for path, conversion in bound.conversions.modules.items():
            table.add_row(path, bound.conversions.peft_type.lower(), str(conversion.rank or ""), "")
    for path, tokens in bound.tokens.items():
        table.add_row(path, f"{len(tokens.token_ids)} trained tokens", "", "")
    for path, own in bound.parameters.items():
        table.add_row(path, f"own {', '.join(own)}", "", "")
    return table
