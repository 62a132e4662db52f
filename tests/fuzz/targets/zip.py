"""An uploaded zip. Python's `zipfile` finds the same in what is taken."""

from __future__ import annotations

import io
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator

from tests.fuzz.mutating import Bytes, either
from tests.fuzz.unpacked import ERRORS, FILES, SIDES, unpacked
from tests.hostile.adapter_files import ARCHIVES, _deflated, zipped

__all__ = ["ERRORS"]
HEADERS = {  # by magic number: the sizes of the fields behind it
    b"PK\x03\x04": (2, 2, 2, 2, 2, 4, 4, 4, 2, 2),
    b"PK\x01\x02": (1, 1, 2, 2, 2, 2, 2, 4, 4, 4, 2, 2, 2, 2, 2, 4, 4),
    b"PK\x05\x06": (2, 2, 2, 2, 4, 4, 2),
    b"PK\x06\x06": (8, 2, 2, 4, 4, 8, 8, 8, 8),
    b"PK\x06\x07": (4, 8, 4),
    b"PK\x07\x08": (4, 4, 4),
}
MAGIC = re.compile(b"|".join(map(re.escape, HEADERS)))
NUMBERS = (0, 1, 8, 20, 45, 0x800, 0x808, 0xFFFF, 0xFFFFFFFF, 2**31, 2**63, 2**64 - 1, 12, 14, 63, 99)


class Pipe(io.BytesIO):
    """No place can be gone back to, so sizes are written behind the content."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise OSError

    def tell(self) -> int:
        raise OSError


def fuzz(data: bytes) -> None:
    found = unpacked(data)
    if not data.startswith(b"PK"):
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name, content in found.items():
            judged = [one for one in archive.infolist() if one.filename.split("/")[-1] == name and not one.is_dir()]
            assert content in [archive.read(one) for one in judged], name


def seeds() -> Iterator[bytes]:
    yield zipped(FILES)
    yield _deflated({f"x/{name}": content for name, content in (FILES | SIDES).items()})
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
        archive.comment = b"of a pipe"
    yield pipe.getvalue()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in FILES.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(content)
    yield buffer.getvalue()
    made = (
        change(FILES)
        for name, change in ARCHIVES.items()
        if "bomb" not in name and ("zip" in name or name == "windows")
    )
    yield from (seed for seed in made if len(seed) < 16384)


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    return either(_fields, _content, lambda data, most, _, of_bytes: of_bytes(data, most))(
        data, max_bytes, seed, mutate_bytes
    )


def _fields(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """Some fields of some headers."""
    rng, made = random.Random(seed), bytearray(data)
    places = [(match.end(), HEADERS[match.group()]) for match in MAGIC.finditer(data)]
    if not places:
        return mutate_bytes(data, max_bytes)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, sizes = rng.choice(places)
        which = rng.randrange(len(sizes))
        start, size = place + sum(sizes[:which]), sizes[which]
        old = int.from_bytes(made[start : start + size], "little")
        number = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, len(data), len(data) - place, rng.choice(places)[0]))
        made[start : start + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(made[:max_bytes])


def _content(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """A member's content, with its checksum and its sizes in both places where they stand alike."""
    local = struct.Struct("<4sHHHHHIIIHH")
    rng, places = random.Random(seed), [match.start() for match in re.finditer(rb"PK\x03\x04", data)]
    at = rng.choice(places or [0])
    if len(data) < at + local.size or not places:
        return mutate_bytes(data, max_bytes)
    header = local.unpack_from(data, at)
    start = at + local.size + header[9] + header[10]
    content = data[start : start + header[7]]
    made = mutate_bytes(content, max(len(content), 1)).ljust(len(content), b"\0")[: len(content)]
    checksum = zlib.crc32(made if header[3] == 0 else _inflated(made)).to_bytes(4, "little")
    old = header[6].to_bytes(4, "little")
    return (data[:start] + made + data[start + len(content) :]).replace(old, checksum)[:max_bytes]


def _inflated(content: bytes) -> bytes:
    try:
        return zlib.decompressobj(-15).decompress(content, 2**20)
    except zlib.error:
        return b""
