"""An uploaded tar, plain or under gzip. Python's `tarfile` finds the same in what is taken."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Iterator

from tests.fuzz.mutating import Bytes, either
from tests.fuzz.unpacked import ERRORS, FILES, SIDES, unpacked
from tests.hostile.adapter_files import ARCHIVES, tar

__all__ = ["ERRORS"]
BLOCK = 512
FIELDS = {  # of a header: place, length, values
    "name": (
        0,
        100,
        [b"adapter_config.json", b"x/adapter_config.json", b"../a", b"/a", b"a/", b"", b"\xff", b"a" * 100],
    ),
    "size": (
        124,
        12,
        [b"0", b"00000000050\0", b"77777777777\0", b"\x80" + bytes(10) + b"\x28", b"\xff" * 12, b"-1", b"8"],
    ),
    "checksum": (148, 8, [b"0", b"\0" * 8, b"\x80" + bytes(7)]),
    "kind": (156, 1, [b"0", b"\0", b"7", b"5", b"D", b"x", b"L", b"g", b"K", b"V", b"1", b"2", b"S", b"M", b"\xff"]),
    "magic": (257, 8, [b"ustar\x0000", b"ustar  \0", bytes(8)]),
    "prefix": (345, 155, [b"x", b"..", b"/", b"", b"a" * 155]),
}
RECORDS = (b"path", b"size", b"GNU.sparse.size", b"GNU.sparse.major", b"linkpath", b"charset", b"comment", b"mtime")
VALUES = (
    b"",
    b"0",
    b"40",
    b"-1",
    b"9" * 30,
    b"adapter_config.json",
    b"../x",
    b"x/adapter_model.safetensors",
    b"\xff\xfe",
)


def fuzz(data: bytes) -> None:
    found = unpacked(data)
    if data.startswith(b"PK"):
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for name, content in found.items():
            judged = [archive.extractfile(one) for one in archive if one.isfile() and one.name.split("/")[-1] == name]
            assert content in [one.read() for one in judged if one is not None], name


def seeds() -> Iterator[bytes]:
    yield tar(FILES)
    yield tar({f"x/{name}": content for name, content in (FILES | SIDES).items()})
    yield tar(FILES, "w:gz")
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for name, content in FILES.items():
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(content), 1.5
                archive.addfile(info, io.BytesIO(content))
            if form != tarfile.USTAR_FORMAT:
                archive.addfile(tarfile.TarInfo("ä" * 120))
        yield buffer.getvalue()
    made = (change(FILES) for name, change in ARCHIVES.items() if "bomb" not in name and "zip_" not in name)
    yield from (seed for seed in made if len(seed) < 16384)


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    return either(_fields, _under_gzip, _records, lambda data, most, _, of_bytes: of_bytes(data, most))(
        data, max_bytes, seed, mutate_bytes
    )


def _fields(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """A block moved, doubled or taken away, or a field of a header changed, and the checksums made right again."""
    rng, blocks = random.Random(seed), [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(blocks) or 1)
        if not blocks or len(blocks[at]) < BLOCK:
            return mutate_bytes(data, max_bytes)
        match rng.randrange(6):
            case 0:
                blocks.insert(rng.randrange(len(blocks)), blocks[at])
            case 1 if len(blocks) > 1:
                del blocks[at]
            case _:
                place, length, values = rng.choice(list(FIELDS.values()))
                value = rng.choice(values)[:length].ljust(length, b"\0")
                blocks[at] = _summed(blocks[at][:place] + value + blocks[at][place + length :])
    return b"".join(blocks)[:max_bytes]


def _summed(block: bytes) -> bytes:
    plain = block[:148] + b" " * 8 + block[156:]
    return plain[:148] + b"%06o\0 " % sum(plain) + plain[156:]


def _under_gzip(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    try:
        inner = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except Exception:
        return mutate_bytes(data, max_bytes)
    made = gzip.compress(_fields(inner, max_bytes, seed, mutate_bytes), 1, mtime=0)
    return made if len(made) <= max_bytes else mutate_bytes(data, max_bytes)


def _records(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """An extended header before the archive."""
    rng = random.Random(seed)
    content = b"".join(_record(rng) for _ in range(rng.choice((1, 1, 2, 5))))
    if rng.random() < 0.2:
        content = mutate_bytes(content, 1024)
    kind = rng.choice((b"x", b"x", b"g", b"L", b"K"))
    head = b"pax".ljust(124, b"\0") + b"%011o\0" % len(content) + bytes(20) + kind
    header = _summed(head.ljust(257, b"\0") + b"ustar\x0000" + bytes(247))
    made = header + content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0") + data
    return made if len(made) <= max_bytes else mutate_bytes(data, max_bytes)


def _record(rng: random.Random) -> bytes:
    text = b" %s=%s\n" % (rng.choice(RECORDS), rng.choice(VALUES))
    length = len(text) + 1
    length = len(text) + len(str(length + (len(str(length)) > 1)))
    return b"%d%s" % (length + rng.choice((0, 0, 0, 0, 1, -1)), text)
