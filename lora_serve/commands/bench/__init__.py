"""`lora-serve bench`: sends a load to any server that speaks OpenAI's HTTP API, and reports latencies and throughput.

Its parts can be used alone: `load.run_load(target, plan)` with `Target`, `Plan` and `Workload` of `workload` gives a
`report.LoadResult`, `report.summarise` its figures.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lora_serve.commands.output import ExitCode


def run(arguments: list[str]) -> int:
    """Runs the bench; returns the exit code. Raises ConfigError for a wrong command line, or if no server answers."""
    from lora_serve.commands.bench.flags import PROGRAM, bench_parser, check_flags
    from lora_serve.commands.flags import named_urls, urls_here
    from lora_serve.commands.output import Output
    from lora_serve.commands.server_process import ServerFailedError

    flags = bench_parser().parse_args(arguments)
    check_flags(flags)
    output = Output(flags.json)
    command = " ".join([PROGRAM, *map(shlex.quote, without_secrets(arguments))])
    from lora_serve.commands.bench.running import run_against, run_spawned

    try:
        if flags.spawn:
            return run_spawned(flags, output, command)
        return run_against(flags, flags.url or (named_urls() or urls_here())[0], output, command, {})
    except ServerFailedError as error:
        output.note(f"lora-serve: error: {error}")
        return ExitCode.REFUSED
    except KeyboardInterrupt:
        output.note("interrupted")
        return ExitCode.INTERRUPTED


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments as a report shows them, without the key's value."""
    found: list[str] = []
    for argument in arguments:
        if found and found[-1] == "--api-key":
            found.append("...")
        else:
            found.append("--api-key=..." if argument.startswith("--api-key=") else argument)
    return found
