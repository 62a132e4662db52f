"""The chart's schema of single settings, as the server's own settings tell it: `python -m tests.deploy.setting_schema`
writes it into values.schema.json.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BeforeValidator, TypeAdapter

from lora_serve.core.settings import Settings
from tests.deploy.rendering import CHART

FILE = CHART / "values.schema.json"
_PATTERNS = {"integer": "^-?[0-9]+$", "number": r"^-?[0-9]+(\.[0-9]+)?$"}  # a number may be given as a text
_LIMITS = ("minimum", "maximum", "exclusiveMinimum")


def setting_schemas(names: list[str]) -> dict[str, Any]:
    """Those settings with fixed choices and those that are plain numbers; the others are read by the server alone."""
    told = TypeAdapter(Settings).json_schema()["properties"]
    found = {name: _schema(told[name]) for name in sorted(names) if not _is_parsed(name)}
    return {name: schema for name, schema in found.items() if schema}


def _is_parsed(name: str) -> bool:
    """True for settings with a notation of their own, such as bytes."""
    return any(isinstance(item, BeforeValidator) for item in Settings.model_fields[name].metadata)


def _schema(told: dict[str, Any]) -> dict[str, Any]:
    told = next(item for item in told.get("anyOf", [told]) if item.get("type") != "null")
    if "enum" in told:  # YAML reads `on` and `off` as booleans, which the chart turns back
        booleans = [value for word, value in (("on", True), ("off", False)) if word in told["enum"]]
        return {"enum": told["enum"] + booleans}
    kind = told.get("type")
    if kind not in _PATTERNS or "ge" in told:
        return {}
    limits = {name: told[name] for name in _LIMITS if name in told}
    return {"type": [kind, "string"], "pattern": _PATTERNS[kind], **limits, "description": "a number"}


def main() -> None:
    schema = json.loads(FILE.read_text())
    settings = schema["properties"]["settings"]
    settings["properties"] = setting_schemas(settings["propertyNames"]["enum"])
    FILE.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
