"""Renders the chart by Helm itself, as a child: reads {name: values} as JSON, prints {name: {file: text} or a refusal}.

A process of its own, as Helm's library is written in Go, whose threads and signal handlers stay for good.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "lora-serve"


def main() -> None:
    helm_python.disable_logging()
    asked: dict[str, dict[str, Any]] = json.load(sys.stdin)
    with helm_python.Chart.load(CHART) as chart:
        answers = {name: rendered(chart, values) for name, values in asked.items()}
    report = helm_python.lint(CHART, next(iter(asked.values())), strict=True, kube_version="v1.30.0")
    json.dump({"answers": answers, "lint": report}, sys.stdout)


def rendered(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, str] | str:
    """File name -> manifest; Helm's words if it refuses."""
    try:
        return chart.render(values, name="lora-serve", namespace="ai", is_install=True)
    except helm_python.HelmError as error:
        return str(error)


if __name__ == "__main__":
    main()
