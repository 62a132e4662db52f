"""The flags of `lora-serve bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from lora_serve.commands.bench.report import Objective
from lora_serve.commands.bench.workload import (
    POPULARITIES,
    ZIPF_EXPONENT,
    AdapterField,
    Endpoint,
    UsageReports,
    parse_lengths,
)
from lora_serve.commands.flags import CommandParser, count, json_object, seconds, server_url
from lora_serve.core.errors import ConfigError
from lora_serve.core.strict_json import JsonError, parse_json
from lora_serve.random_weights import RANKS, SHAPES

PROGRAM = "lora-serve bench"
ResponseFormats = tuple[Mapping[str, Any], ...]
_FORMAT_KINDS = ("text", "json_object", "json_schema", "structural_tag")
DESCRIPTION = """Send a load to any server that speaks OpenAI's HTTP API, time every token, report.

A closed loop (--concurrency users, each sending its next request when the last one is answered), or an open loop
(--rate, or a --trace with times), whose latencies count from the planned time of each request."""
EPILOG = """examples:
  lora-serve bench --spawn --shape 135m --adapters 16 --out bench
  lora-serve bench --url http://127.0.0.1:8000 --adapters 8 --popularity skewed --num-requests 500 --concurrency 32
  lora-serve bench --rate 4 --arrival gamma --burstiness 0.25 --duration 120 --slo ttft:500,itl:100
  lora-serve bench --trace benchmarks/traces/azure_conv_2023_cut.csv --speed 4 --adapters 100 --popularity skewed
  lora-serve bench --url http://127.0.0.1:8080 --adapter-field llama-cpp --adapters 16      (llama.cpp's server)

exit codes:
  0    every request was answered
  1    a request failed, or the server did not start; the report is written all the same
  2    the command line is wrong, or nobody answers at --url
  130  interrupted (Ctrl-C)"""


def bench_parser() -> CommandParser:
    parser = CommandParser(PROGRAM, DESCRIPTION, EPILOG)
    _add_target(parser.add_argument_group("the server"))
    _add_spawn(parser.add_argument_group("a server of our own, on random weights"))
    _add_loop(parser.add_argument_group("when requests are sent"))
    _add_requests(parser.add_argument_group("what they ask for"))
    _add_output(parser.add_argument_group("the report"))
    return parser


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--url",
        type=server_url,
        metavar="URL",
        help="the server (LORA_SERVE_URL; default: the one started last on this machine)",
    )
    add("--model", metavar="NAME", help="the base model's name (default: the first of /v1/models without a parent)")
    add("--api-key", metavar="KEY", help="bearer key (LORA_SERVE_API_KEY, else OPENAI_API_KEY)")
    add("--endpoint", choices=get_args(Endpoint), default="completions", help="default: completions")
    add("--adapter-field", choices=get_args(AdapterField), default="model",
        help="how a request names its adapter: as `model`, as `adapter_id` beside it, in the header X-Adapter-Id, or "
        "as llama.cpp's `lora` list (default: model)")  # fmt: skip
    add("--usage", choices=get_args(UsageReports), default="continuous",
        help="what is asked for in stream_options: a token count with every chunk, one at the end, or nothing, for "
        "servers that refuse the field (default: continuous)")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields for every request")
    add("--timeout", type=seconds, default=3600.0, metavar="SECONDS", help="for one answer (default: 3600)")
    add("--engine", metavar="NAME", help="the report's name of the server (default: what /v1/models says)")


def _add_spawn(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--spawn", action="store_true", help="start our server on a model and --adapters N made for it, then stop it")
    add("--shape", choices=SHAPES, default="135m", help="of the model (default: 135m)")
    add("--ranks", type=_ranks, default=RANKS, metavar="N,N", help="of the adapters, in turn (default: 8,16,32)")
    add("--cache", type=Path, metavar="DIR", help="where they are kept (default: lora_serve/bench in the user's cache)")
    add("--server-flags", default="", metavar="FLAGS", help='more flags for `lora-serve serve`, as in "--max-loras 8"')


def _add_loop(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--concurrency", type=count, metavar="N",
        help="users of the closed loop (default: 16); with --rate or a trace's times: at most so many under way "
        "(default: no limit)")  # fmt: skip
    add("--rate", type=_above_zero, metavar="N", help="requests per second: an open loop")
    add("--arrival", choices=("poisson", "gamma"), default="poisson", help="of the open loop (default: poisson)")
    add("--burstiness", type=_above_zero, metavar="X",
        help="shape of --arrival gamma: below 1 in bursts, 1 is Poisson, above more regular (default: 1)")  # fmt: skip
    add("--num-requests", type=count, metavar="N",
        help="default: 64; all of a --trace; as many as fit into --duration")  # fmt: skip
    add("--duration", type=seconds, metavar="SECONDS", help="send for so long, then await what is under way")
    add("--warmup-requests", type=_from_zero, default=0, metavar="N",
        help="sent before, every adapter in turn, and not counted (default: 0)")  # fmt: skip


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--adapters", type=_adapters, metavar="N|NAMES",
        help="the first N that the server lists, or names with commas (default: all; with --spawn: 16)")  # fmt: skip
    add("--adapter-name-pattern", metavar="TEXT", help="names of --adapters N that are not listed: acme/a{:04d}")
    add("--popularity", choices=POPULARITIES,
        help="base: no adapter; identical: one for all; uniform: each N requests name all N, shuffled; skewed: Zipf; "
        "distinct: in turn (default: uniform with --adapters, else base)")  # fmt: skip
    add("--zipf", type=_above_zero, default=ZIPF_EXPONENT, metavar="X", help="exponent of skewed (default: 1.1)")
    add("--prompt-tokens", type=parse_lengths, default="16-256", metavar="LENGTHS",
        help="128, 16-256, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA (default: 16-256)")  # fmt: skip
    add("--output-tokens", type=parse_lengths, default="64", metavar="LENGTHS", help="the same (default: 64)")
    add("--trace", type=Path, metavar="FILE",
        help="lengths and times: an Azure 2023 CSV, a Mooncake JSONL, or a Vidur CSV of lengths")  # fmt: skip
    add("--speed", type=_above_zero, default=1.0, metavar="X", help="run a trace so many times as fast (default: 1)")
    add("--prompt-form", choices=("ids", "text"), help="token ids or words (default: ids; text for chat)")
    add("--vocab-size", type=count, metavar="N", help="random ids are below it (default: what the server says)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers have exactly --output-tokens, where the server knows the field (default: on)")  # fmt: skip
    add("--response-format", type=response_formats, default=(), metavar="json_object|FILE|DIR",
        help="the form of the answers: any JSON object, or JSON by the schemas (or response_formats) of a JSON file or "
        "of a folder's, in turn")  # fmt: skip
    add("--seed", type=_from_zero, default=0, metavar="N", help="of all that is drawn (default: 0)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", type=Path, metavar="DIR", help="write report.json and report.png there")
    add("--slo", type=parse_objective, metavar="LEVELS",
        help="answers within these ms are goodput: ttft:500,itl:100,e2e:5000; itl is an answer's mean")  # fmt: skip
    add("--json", action="store_true", help="print the report as one line of JSON instead of a table")


def parse_objective(text: str) -> Objective:
    """`ttft:500,itl:100`, in ms. Raises ArgumentTypeError."""
    limits: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in ("ttft", "itl", "e2e"):
            raise argparse.ArgumentTypeError(f"expected levels as ttft:500,itl:100,e2e:5000 (got {text[:60]!r})")
        limits[name] = _above_zero(value) / 1000
    return Objective(**limits)


def _adapters(text: str) -> int | tuple[str, ...]:
    if text.isascii() and text.isdigit():
        return count(text)
    return tuple(name for name in text.split(",") if name)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _from_zero(text: str) -> int:
    return 0 if text == "0" else count(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0 (got {text[:60]!r})")
    return value


NUM_ADAPTERS = 16  # of a server of our own


def check_flags(flags: argparse.Namespace) -> None:
    """Checks the flags against each other. Raises ConfigError."""
    if flags.spawn and flags.url is not None:
        raise ConfigError("--spawn: starts a server of its own, so there is no --url")
    if flags.spawn and isinstance(flags.adapters, tuple):
        raise ConfigError("--adapters: with --spawn a number; it makes them")
    if flags.burstiness is not None and flags.arrival != "gamma":
        raise ConfigError("--burstiness: goes with --arrival gamma")
    if flags.arrival == "gamma" and flags.rate is None:
        raise ConfigError("--arrival gamma: needs a --rate")
    if flags.speed != 1 and (flags.trace is None or flags.rate is not None):
        raise ConfigError("--speed: is the pace of a --trace's own times")
    if flags.endpoint == "chat" and flags.prompt_form == "ids":
        raise ConfigError("--prompt-form ids: chat takes text")
    if flags.adapter_name_pattern is not None and not isinstance(flags.adapters, int):
        raise ConfigError("--adapter-name-pattern: needs --adapters N")


def popularity_of(flags: argparse.Namespace) -> str:
    given: str | None = flags.popularity
    return given or ("uniform" if flags.spawn or flags.adapters is not None else "base")


def num_spawned(flags: argparse.Namespace) -> int:
    if flags.adapters is not None:
        return int(flags.adapters)
    return 0 if popularity_of(flags) == "base" else NUM_ADAPTERS


def api_key(flags: argparse.Namespace) -> str | None:
    given: str | None = flags.api_key
    return given or os.environ.get("LORA_SERVE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def response_formats(text: str) -> ResponseFormats:
    """A format for each schema of a file (one, or a list), or of a folder's files. Raises ArgumentTypeError."""
    if text == "json_object":
        return ({"type": text},)
    path = Path(text)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = tuple(_response_format(value, file.stem) for file in files for value in _schemas_in(file))
    if not found:
        raise argparse.ArgumentTypeError(f"{text[:200]} holds no schema")
    return found


def _schemas_in(file: Path) -> list[Any]:
    try:
        value = parse_json(file.read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(file)[:200]}: {error.strerror}; or say json_object") from None
    except JsonError as error:
        raise argparse.ArgumentTypeError(f"{str(file)[:200]} {error}") from None
    return value if isinstance(value, list) else [value]


def _response_format(value: Any, name: str) -> Mapping[str, Any]:
    """A response_format as it is; a schema as one."""
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{name[:200]}: expected JSON schemas, which are objects")
    is_format = value.get("type") in _FORMAT_KINDS
    return value if is_format else {"type": "json_schema", "json_schema": {"name": name[:64], "schema": value}}
