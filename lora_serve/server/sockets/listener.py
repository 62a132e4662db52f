"""The listening socket: takes few newcomers at a time, and no more once descriptors are short.

asyncio takes as many in one go as may wait. Each is open before anybody can count it, so a burst could take all the
descriptors of the process; and where there is none left it goes on to ask, and to say so, a thousand times a second.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

MAX_BURST = 64  # connections between two turns of the event loop; well below connections.RESERVED_DESCRIPTORS
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener(socket.socket):
    """For `create_server`. The first failure is asyncio's to know, which then pauses for a second."""

    _num_left = MAX_BURST

    def accept(self) -> tuple[socket.socket, Any]:
        """BlockingIOError, which ends asyncio's round, also when this round's share is used up."""
        if self._num_left == MAX_BURST:
            asyncio.get_running_loop().call_soon(self._begin_round)
        if self._num_left <= 0:
            raise BlockingIOError(errno.EAGAIN, "the next round")
        self._num_left -= 1
        try:
            return super().accept()
        except OSError as error:
            if error.errno in SHORT:
                self._num_left = 0
            raise

    def _begin_round(self) -> None:
        self._num_left = MAX_BURST
