"""Writes docs/demo.svg: what `lora-serve demo --once` printed in a terminal of 116 columns, as a picture.

Nothing in the picture is fetched from elsewhere: the viewer's own monospaced font is used.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
COLUMNS = 116
THEME = TerminalTheme(
    (27, 30, 36),
    (222, 226, 232),
    [
        (27, 30, 36),
        (240, 113, 120),
        (152, 195, 121),
        (229, 192, 123),
        (97, 175, 239),
        (198, 120, 221),
        (86, 182, 194),
        (222, 226, 232),
    ],
)


def main() -> int:
    """Runs the demo and draws what it printed; its exit code."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ ./scripts/demo --once", style="bold"))
    console.print(Text.from_ansi(_output([sys.executable, "-m", "lora_serve", "demo", "--once"])))
    svg = console.export_svg(title="lora_serve", theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    svg = re.sub(r"terminal-\d+-", "demo-", svg)
    PICTURE.write_text(svg)
    return 0


def _output(command: list[str]) -> str:
    """What a command writes to a terminal. Raises CalledProcessError."""
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    child = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece
    if code := child.wait():
        raise subprocess.CalledProcessError(code, command, shown)
    return shown.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    sys.exit(main())
