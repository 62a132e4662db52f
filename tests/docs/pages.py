"""The code blocks of a Markdown page, and one bash program that runs them in order against a server.

A comment on the line before a block says how it is run; without one it is run and must exit with 0:

    <!-- test: server -->          starts a server: it runs beside the blocks that follow, once /ready answers 200
    <!-- test: redis -->           starts a redis-server of its own
    <!-- test: fails -->           must exit with another code than 0
    <!-- test: skip, REASON -->    is not run (tests/docs/test_code_blocks.py lists these)
    <!-- file: PATH -->            is a file: it is written before the blocks that follow are run
    <!-- patch -->                 is a change of files, applied in the same way
    <!-- output -->                is no code: its lines must occur, in order, in what the block before it printed;
                                   `...` stands for any text
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_serve.commands.server_process import free_port

ROOT = Path(__file__).resolve().parents[2]
RUN = ("bash", "python")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:test: |output|file: |patch)[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_READY = """for attempt in $(seq 600); do
  if ! kill -0 $server 2>/dev/null; then cat "$out/$1"; exit 90; fi
  if curl -s http://127.0.0.1:8000/ready | grep -q '"ready"'; then return 0; fi
  sleep 0.2
done
cat "$out/$1"
exit 91"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    mark: str  # of the comment before it, or ""
    text: str

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.mark.startswith(("test: skip", "file: "))

    @property
    def is_written(self) -> bool:
        return self.mark == "patch" or self.mark.startswith("file: ")


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found = _BLOCK.finditer(page.read_text())
    return [Block(match["language"], match["mark"] or "", match["text"]) for match in found]


def program(page: Sequence[Block], port: int, redis_port: int) -> str:
    """A bash program that runs the blocks in its working folder; $out/N has what block N printed."""
    lines = ["set -euo pipefail", f"wait_until_ready() {{\n{_READY}\n}}", "server= redis="]
    lines.append('stop() { [[ -z "$server" ]] || { kill -INT -- -$server && wait $server || true; }; server=; }')
    lines.append("trap 'stop; [[ -z \"$redis\" ]] || kill $redis' EXIT")
    for number, block in enumerate(page):
        if block.is_run or block.is_written:
            lines += _lines(number, block)
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{port}", text)
    text = re.sub(r"localhost:6379|(?<=--port )6379", lambda match: match[0].replace("6379", str(redis_port)), text)
    return text.replace("./scripts/demo", f"./scripts/demo --port {port}")


def _lines(number: int, block: Block) -> Iterator[str]:
    """One block as bash, with its output kept."""
    text, to = block.text.rstrip("\n"), f'> "$out/{number}" 2>&1'
    if block.language == "python" and block.is_run:
        text = f"python -c {shlex.quote(text)}"
    match block.mark:
        case "test: server":
            # In a process group of its own, which a Ctrl-C of a terminal would reach as a whole.
            yield f"stop\nset -m\n{{\n{text}\n}} {to} &\nserver=$!\nset +m\nwait_until_ready {number}"
        case "test: redis":
            yield f"{text.replace(' --daemonize yes', '')} {to} &\nredis=$!\nsleep 1"
        case "patch":
            yield f"git apply - <<'END_OF_BLOCK'\n{text}\nEND_OF_BLOCK"
        case mark if mark.startswith("file: "):
            path = mark.removeprefix("file: ")
            yield f"mkdir -p {Path(path).parent}\ncat > {path} <<'END_OF_BLOCK'\n{text}\nEND_OF_BLOCK"
        case "test: fails":
            yield f"set +e\n(\nset -e\n{text}\n) {to}\ncode=$?\nset -e\n[[ $code != 0 ]] || exit 92"
        case "":
            yield f"{{\n{text}\n}} {to}"
        case mark:
            raise ValueError(f"<!-- {mark} --> means nothing")


def expected(page: Sequence[Block]) -> Iterator[tuple[int, str]]:
    """Each block of output with the number of the block that must have printed it."""
    for number, block in enumerate(page):
        if block.mark == "output":
            before = max(other for other in range(number) if page[other].is_run)
            yield before, block.text


def missing(shown: str, wanted: str) -> str | None:
    """The first piece of `wanted` that `shown` lacks, looking only behind the pieces before it."""
    position = 0
    for piece in re.split(r"\.\.\.|\n", wanted):
        if piece := piece.strip():
            found = shown.find(piece, position)
            if found < 0:
                return piece
            position = found + len(piece)
    return None


def check_page(page: Path, folder: Path, environment: Mapping[str, str], out: Path, timeout: float) -> None:
    """Run a page's blocks in `folder`; each must end well and print what the page shows.

    `out`: a new folder for what the blocks print. `timeout`: seconds.
    """
    out.mkdir()
    found, port = blocks(page), free_port()
    address = {"LORA_SERVE_PORT": str(port), "LORA_SERVE_URL": f"http://127.0.0.1:{port}", "out": str(out)}
    ended = subprocess.run(
        ["bash", "-c", program(found, port, free_port())],
        cwd=folder,
        env={**environment, **address},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    printed = {int(path.name): path.read_text() for path in out.iterdir() if path.name.isdigit()}
    last = max(printed, default=0)
    said = f"{printed.get(last, '')[-3000:]}\n{ended.stdout[-1000:]}\n{ended.stderr[-1000:]}"
    assert ended.returncode == 0, f"{page.name}, code {ended.returncode} in block:\n{found[last].text}\n{said}"
    for number, wanted in expected(found):
        lacking = missing(printed[number], wanted)
        assert lacking is None, (
            f"{page.name}: {lacking!r} is not in what this printed:\n{found[number].text}\n{printed[number]}"
        )
