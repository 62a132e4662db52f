"""Rows that have a module their own way: a kernel that swallows the module cannot serve them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_serve.model.step.step_context import StepInputs

ChangeTable = Mapping[int, Any]  # by slot, of one module; kept up to date by `LoraSlots`


def any_in(step: StepInputs, tables: Sequence[ChangeTable]) -> bool:
    """Whether a row of the step changes one of these modules."""
    filled = [table for table in tables if table]
    if not filled:
        return False
    slots = {segment.slot for tokens in step.lora for segment in tokens.segments}
    return any(slot in table for table in filled for slot in slots)
