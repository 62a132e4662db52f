"""Standard output and error of a server lead into its log's queue, however they were opened or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIVERTED = "import os, sys; from lora_serve.logs.streams import divert_streams; writer = divert_streams()\n"


def python(program: str, **how: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "flood",
    [
        "for _ in range(3000): print('x' * 100)",
        "for _ in range(3000): sys.stderr.write('x' * 100)",
        "import ctypes; c = ctypes.CDLL(None)\nfor n in (1, 2):\n  for _ in range(3000): c.write(n, b'x' * 100, 100)",
        "import faulthandler\nfor _ in range(1000): faulthandler.dump_traceback(2)",
        "import warnings\nfor n in range(3000): warnings.warn(f'{n}' * 100)",
        "import threading\nfor n in range(200):\n  t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    ],
    ids=["print", "stderr", "c", "faulthandler", "warnings", "thread"],
)
def test_nothing_that_writes_waits_for_a_reader(flood: str) -> None:
    child = python(f"{DIVERTED}{flood}\nos._exit(7)", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.wait(60) == 7
    for pipe in (child.stdout, child.stderr):
        assert pipe is not None
        pipe.close()


def test_pipe_of_others_stays_as_it_was() -> None:
    """The flag is of an opened file, which a shell's other commands share."""
    reader, end = os.pipe()
    child = python(f"{DIVERTED}assert not os.get_blocking(2)\nos._exit(0)", stderr=end)
    assert child.wait(60) == 0
    assert os.get_blocking(end)
    os.close(reader)
    os.close(end)


def test_file_is_written_where_others_left_off(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        child = python(f"{DIVERTED}print('inside'); writer.flush(5); os._exit(0)", stdout=file, stderr=file)
        assert child.wait(60) == 0
        file.write(b"after\n")
    assert (tmp_path / "log").read_text() == "before\ninside\nafter\n"


def test_no_file_takes_the_place_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    program = (
        "import sys; from lora_serve.logs.streams import open_standard_descriptors as o; o(); o()\n"
        "with open(sys.argv[1], 'w') as file: assert file.fileno() > 2\n"
        "print('x'); print('y', file=sys.stderr); sys.stderr.isatty()\n"
    )
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, program, str(tmp_path / "x")], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "x").read_text() == ""
