"""Nobody waits for the log's reader, however standard output and error were opened or not; what that costs is said."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.logs import writer as module
from lora_serve.logs.writer import LogWriter

PIPE_BYTES = 4096


class Pipe:
    """As small as a pipe can be."""

    def __init__(self) -> None:
        self.reader, self.end = os.pipe()
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._writers: list[LogWriter] = []

    def writer(self, **bounds: int) -> LogWriter:
        self._writers.append(LogWriter(self.end, **bounds))  # type: ignore[arg-type]
        return self._writers[-1]

    def leave(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def text_until(self, words: str) -> str:
        found = b""
        while words.encode() not in found:
            found += os.read(self.reader, 2**16)
        return found.decode()

    def close(self) -> None:
        self.leave()
        for writer in self._writers:
            writer.close()
        os.close(self.end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", 0.01)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_full_pipe_costs_nobody_time_and_the_lines_that_are_missing_are_counted(pipe: Pipe, is_blocking: bool) -> None:
    os.set_blocking(pipe.end, is_blocking)
    os.write(pipe.end, b"\n" * PIPE_BYTES)
    writer = pipe.writer(max_texts=100)
    start = time.monotonic()
    for number in range(5000):
        writer.add(f"line {number} {'.' * 100}\n")
    assert time.monotonic() - start < 5
    assert writer.num_dropped > 4000
    text = pipe.text_until("were dropped\n").lstrip("\n")
    writer.add("after\n")
    text += pipe.text_until("after\n")
    lines = text.splitlines()
    assert all(re.fullmatch(rf"line \d+ \.{{100}}|{writer.num_dropped} records were dropped|after", x) for x in lines)
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert numbers == list(range(5000 - writer.num_dropped))
    assert writer.flush(5)


def test_size_of_what_waits_is_bounded_too(pipe: Pipe) -> None:
    writer = pipe.writer(max_bytes=10_000)
    for _ in range(100):
        writer.add("x" * 999 + "\n")
    assert writer.num_dropped > 80


def test_what_is_urgent_finds_room_in_a_full_queue(pipe: Pipe) -> None:
    writer = pipe.writer(max_texts=10)
    for number in range(200):
        writer.add(f"{number} {'.' * 1000}\n")
    assert writer.num_dropped > 0
    writer.add("the end\n", urgent=True)
    assert "the end\n" in pipe.text_until("the end\n")


def test_flush_waits_no_longer_than_it_may(pipe: Pipe) -> None:
    writer = pipe.writer()
    writer.add("x" * 100_000)
    assert not writer.flush(0.05)


def test_reader_that_has_left_is_no_error_and_delays_no_end(pipe: Pipe) -> None:
    writer = pipe.writer(max_texts=10)
    pipe.leave()
    for _ in range(100):
        writer.add("x\n")
    start = time.monotonic()
    assert not writer.flush(60)
    assert time.monotonic() - start < 30
    assert writer.num_dropped > 0


def test_disk_that_is_full_is_tried_again_and_nothing_is_torn(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [5, OSError(28, "No space left on device"), 3, OSError(28, "No space left on device")]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        step = room.pop(0) if room else len(data)
        if isinstance(step, OSError):
            raise step
        return real(descriptor, data[:step])

    monkeypatch.setattr(module.os, "write", write)
    writer = pipe.writer()
    writer.add("first line\n")
    writer.add("second line\n")
    assert pipe.text_until("second line\n") == "first line\nsecond line\n"
    assert not room


def test_forked_child_begins_anew_and_does_not_wait_for_its_parents_thread(pipe: Pipe) -> None:
    writer = pipe.writer()
    writer.add("parent\n")
    with writer._changed:  # the child would find it locked by a thread that it has not
        child = os.fork()
        if child == 0:
            writer.add("child\n")
            os._exit(0 if writer.flush(20) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert writer.flush(20)
    assert sorted(pipe.text_until("child\n").split()) == ["child", "parent"]


def test_text_that_is_none_is_shown_as_its_bytes(pipe: Pipe) -> None:
    writer = pipe.writer()
    writer.add("half \ud83d\n")
    assert pipe.text_until("\n") == "half \\ud83d\n"


DIVERTED = "import os, sys; from lora_serve.logs.writer import divert_streams; writer = divert_streams()\n"


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
        "import sys; from lora_serve.logs.writer import open_standard_descriptors as o; o(); o()\n"
        "with open(sys.argv[1], 'w') as file: assert file.fileno() > 2\n"
        "print('x'); print('y', file=sys.stderr); sys.stderr.isatty()\n"
    )
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, program, str(tmp_path / "x")], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "x").read_text() == ""
