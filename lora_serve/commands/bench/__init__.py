"""`lora-serve bench`: sends a load to any server that speaks OpenAI's HTTP API, and reports latencies and throughput.

Its parts can be used alone: `load.run_load(target, plan)` with `target.Target`, `plan.Plan` and `workload.Workload`
gives a `result.LoadResult`, `report.summarise` its figures.
"""

from __future__ import annotations


def run(arguments: list[str]) -> int:
    """Runs the bench; returns the exit code. Raises ConfigError for a wrong command line, or if nobody answers."""
    from lora_serve.commands.bench import command

    return command.run(arguments)
