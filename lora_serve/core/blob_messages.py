"""Messages about blobs: adapters' folders, which the server's process has and the loaders of another process's engine
read. Where both see the same files a folder is named; else its files cross in pieces, each asked for.
"""

from __future__ import annotations

from pathlib import Path

from lora_serve.core.live import Call, Message

PIECE_BYTES = 2**20  # other messages wait behind a piece: 8 ms at 1 Gbit/s


class OpenBlob(Call, frozen=True):
    """Hold an adapter's folder open until `CloseBlob`; answered by a BlobFolder, or BlobFiles if it is elsewhere."""

    digest: str
    is_near: bool  # only if it is on this machine, and unchecked; else it is fetched and verified


class OpenStaged(Call, frozen=True):
    """Likewise for the folder that is to be converted or validated; answered by BlobFiles."""

    of: int  # the server's call


class CloseBlob(Message, frozen=True):
    """The folder that the call of this id opened was read."""

    call_id: int


class KeepBeside(Call, frozen=True):
    """Move a file that the engine has written into the adapter's folder; answered by None."""

    digest: str
    path: Path


class ReadPiece(Call, frozen=True):
    """Asks for a FilePiece of an opened folder's file."""

    opened: int  # the call that opened it
    name: str
    offset: int


class WritePiece(Call, frozen=True):
    """Write the next bytes of a staged folder's file, which replaces the old one; answered by None."""

    of: int  # the server's Convert
    name: str
    offset: int
    content: bytes


class BlobFolder(Message, frozen=True):
    """A folder that stays until CloseBlob, the tier that had it, and the seconds that fetch and check took."""

    folder: Path
    tier: str
    fetch: float
    verify: float
    scratch: Path  # a folder on its file system, for files that KeepBeside moves


class BlobFiles(Message, frozen=True):
    """The files of a folder that the engine does not see: ReadPiece gives them until CloseBlob."""

    sizes: dict[str, int]  # by name
    digest: str
    tier: str
    fetch: float
    verify: float


class FilePiece(Message, frozen=True):
    """Bytes of a file; fewer than PIECE_BYTES only at its end."""

    content: bytes


BlobCall = OpenBlob | OpenStaged | ReadPiece | WritePiece | KeepBeside
BlobMessage = BlobCall | CloseBlob
