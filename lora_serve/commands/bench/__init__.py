"""`lora-serve bench`: load on any server that speaks OpenAI's HTTP API, and what came of it.

Others use its parts: `load.run_load(target, plan)` with `target.Target`, `plan.Plan` and `workload.Workload` gives a
`result.LoadResult`, `report.summarise` its figures.
"""

from __future__ import annotations


def run(arguments: list[str]) -> int:
    """The exit code. Raises ConfigError for a wrong command line, or if nobody answers."""
    from lora_serve.commands.bench import command

    return command.run(arguments)
