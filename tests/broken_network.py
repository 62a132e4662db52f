"""A TCP proxy between a program and a server: it can be cut, fall silent, or lose the answer to one request."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

PIECE = 2**16


class BrokenNetwork:
    """Passes connections on to 127.0.0.1:`port`, until it is told otherwise."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_lost = 0  # answers
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._is_cut = self._is_silent = self._is_over = False
        self._lost_after = b""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> BrokenNetwork:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = self._is_cut = True
            self._lock.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.end_connections()
        for thread in self._threads:
            thread.join()

    def end_connections(self) -> None:
        """Those that there are; new ones are passed on."""
        with self._lock:
            for one in self._open:
                _end(one)

    def cut(self) -> None:
        """Ends every connection, now and later."""
        self._is_cut = True
        self.end_connections()

    def fall_silent(self) -> None:
        """Passes nothing on; what is sent meanwhile arrives once it is mended, though nobody may wait for it then."""
        self._is_silent = True

    def mend(self) -> None:
        with self._lock:
            self._is_cut = self._is_silent = False
            self._lock.notify_all()

    def lose_answer_to(self, words: bytes) -> None:
        """Ends the next connection that sends `words`, after these have reached the server."""
        self._lost_after = words

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """A connection, from its beginning to its end."""
        with near, far:
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
            if self._is_cut:
                self.end_connections()
            back = threading.Thread(target=self._pass_on, args=(far, near, False), daemon=True)
            back.start()
            self._pass_on(near, far, True)
            back.join()
            with self._lock:
                self._open -= {near, far}

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                with self._lock:
                    self._lock.wait_for(lambda: not self._is_silent or self._is_over)
                    is_lost = is_request and self._lost_after and self._lost_after in piece
                    if is_lost:
                        self._lost_after, self.num_lost = b"", self.num_lost + 1
                        source.shutdown(socket.SHUT_RDWR)
                sink.sendall(piece)
                if is_lost:
                    return  # the server's answer meets a closed socket, and ends its own side
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
