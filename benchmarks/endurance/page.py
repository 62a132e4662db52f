"""The figures in docs/explanation/reliability.md, and what must not be among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import made_on, put_between

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- endurance: begin -->", "<!-- endurance: end -->"
MAX_KIB_PER_1000 = 1024.0  # of memory, for a thousand cycles: 1 KiB each
LEAST_CYCLES = 5000  # of a run whose memory is judged: it comes in pieces of megabytes
MAX_BYTES_OF_A_STREAM = 100_000
MAX_BYTES_LEFT = 2_000  # by each stream of a second wave; what the first leaves, the next one uses
MAX_BYTES_OF_AN_ADAPTER = 10_000
MAX_EXPONENT = 1.3  # of what grows with the number of adapters, from the second size to the third
SLACK = 8  # descriptors
TITLES = {
    "start_processor_s": "start, seconds of the processor",
    "bytes_of_memory_for_each": "memory for each adapter",
    "peak_mib": "memory at most",
    "first_page_ms": "the first page of 100 ids",
    "middle_page_ms": "a page of 100 in the middle",
    "sorted_page_ms": "a page of 100, by size",
    "models_of_a_tenant_ms": "a page of one tenant of 100",
    "all_pages_ms": "all pages of 1 000",
    "register_ms": "register one more",
    "delete_ms": "delete one",
    "cold_answer_ms": "a cold answer",
}


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be; empty: the server withstood it all."""
    judges = {"cycles": _of_cycles, "uploads": _of_uploads, "streams": _of_streams, "registered": _of_registered}
    absent = [f"{part} was not run" for part in judges if part not in report]
    return absent + [line for part, judge in judges.items() if part in report for line in judge(report[part])]


def _of_cycles(part: dict[str, Any]) -> Iterator[str]:
    fewest, most = part["descriptors"]
    if part["wrong"] or part["left"]:
        yield f"cycles: {part['wrong']} wrong ({part['first_wrong']}), {part['left']} ids left"
    grows = part["cycles"] >= LEAST_CYCLES and part["memory_slope_kib_per_1000"] > MAX_KIB_PER_1000
    if grows or most > fewest + SLACK:
        yield f"cycles: memory or descriptors grow: {part}"


def _of_uploads(part: dict[str, Any]) -> Iterator[str]:
    if part["there"] != part["uploads"] or set(part["statuses"]) - {"201", "429", "503"}:
        yield f"uploads: {part}"
    if part["descriptors"][1] > part["descriptors"][0] + SLACK:
        yield f"uploads: descriptors stay: {part['descriptors']}"


def _of_streams(parts: dict[str, Any]) -> Iterator[str]:
    for kind, part in parts.items():
        if part["open"] < part["streams"] - SLACK or part["descriptors"][2] > part["descriptors"][0] + SLACK:
            yield f"streams: {kind}: {part}"
        if part["bytes_of_memory_for_each"] > MAX_BYTES_OF_A_STREAM:
            yield f"streams: {kind}: {part['bytes_of_memory_for_each']} bytes for each"
        if part.get("bytes_left_by_each_again", 0) > MAX_BYTES_LEFT:  # results of earlier versions have one wave
            yield f"streams: {kind}: a second wave leaves {part['bytes_left_by_each_again']} bytes for each"


def _of_registered(part: dict[str, Any]) -> Iterator[str]:
    for size in part["sizes"]:
        if size["faults"] or size["bytes_of_memory_for_each"] > MAX_BYTES_OF_AN_ADAPTER:
            yield f"registered: {size}"
    for key, exponents in part["exponents"].items():
        if exponents[-1] is not None and exponents[-1] > MAX_EXPONENT:
            yield f"registered: {key} grows with a power of {exponents[-1]}"


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown, of the parts that were run."""
    rows = {"cycles": _cycle_rows, "uploads": _upload_rows, "streams": _stream_rows}
    lines = [line for part, made in rows.items() if part in report for line in made(report[part])]
    growth = ["", *_growth(report["registered"])] if "registered" in report else []
    made = ["", made_on(report["machine"])] if "machine" in report else []
    return "\n".join(["| what | came of it |", "|---|---|", *lines, *growth, *made])


def _cycle_rows(part: dict[str, Any]) -> Iterator[str]:
    first, last = part["memory_mib"]
    fewest, most = part["descriptors"]
    yield (
        f"| {part['cycles']} adapters loaded, asked and unloaded, 2 slots | {part['wrong']} wrong answers; memory "
        f"{first:.0f} to {last:.0f} MiB, in the second half {part['memory_slope_kib_per_1000']:+.0f} KiB for each "
        f"1 000; descriptors {fewest:.0f} to {most:.0f} |"
    )


def _upload_rows(part: dict[str, Any]) -> Iterator[str]:
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(part["statuses"].items()))
    yield (
        f"| {part['uploads']} uploads at once, of 25 tenants | {statuses}; {part['there']} are there; memory at most "
        f"{part['peak_above_start_mib']:.0f} MiB more; another tenant's answer took {_ratio(part):.1f} times as long |"
    )


def _stream_rows(parts: dict[str, Any]) -> Iterator[str]:
    titles = {"waiting": "streams that wait for their turn", "silent": "connections that say nothing"}
    for kind, part in parts.items():
        memory = f"{part['bytes_of_memory_for_each'] / 1024:.1f} KiB for each{_left(part)}"
        before, _, after = part["descriptors"]
        yield (
            f"| {part['streams']} {titles[kind]} | {memory}; another tenant's new request took "
            f"{_ratio(part):.1f} times as long; descriptors {before:.0f} before, {after:.0f} after |"
        )


def _left(part: dict[str, Any]) -> str:
    memory = part["memory_mib"]
    if len(memory) == 3:
        return ""
    return f"; memory {memory[0]:.0f} MiB before, {memory[2]:.0f} after, {memory[3]:.0f} after as many again"


def _ratio(part: dict[str, Any]) -> float:
    """The median answer meanwhile, by that before."""
    return float(part["answer_ms_meanwhile"]["p50"] / part["answer_ms_before"]["p50"])


def _growth(part: dict[str, Any]) -> Iterator[str]:
    """A column for each size: what is no byte is a ratio to the smallest size."""
    sizes = part["sizes"]
    yield "| registered | " + " | ".join(f"{size['adapters']:,}".replace(",", " ") for size in sizes) + " | exponents |"
    yield "|---|" + "---|" * (len(sizes) + 1)
    for key, title in TITLES.items():
        powers = ", ".join("-" if one is None else f"{one:.2f}" for one in part["exponents"][key])
        yield f"| {title} | " + " | ".join(_shown(key, size, sizes[0]) for size in sizes) + f" | {powers} |"


def _shown(key: str, size: dict[str, Any], first: dict[str, Any]) -> str:
    if key == "bytes_of_memory_for_each":
        return f"{size[key] / 1024:.1f} KiB"
    if key == "peak_mib":
        return f"{size[key]:.0f} MiB"
    return f"x {size[key] / first[key]:.1f}"


def write_page(report: dict[str, Any]) -> None:
    put_between(PAGE, BEGIN, END, table(report))
