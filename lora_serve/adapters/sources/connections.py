"""Connections of sources: not into the operator's own network by accident, and with timeouts."""

from __future__ import annotations

import io
import ipaddress
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.sources.base import OnBytes, refuse
from lora_serve.core.errors import AdapterUnavailableError, InvalidRequestError, NotReadyError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052
_METADATA = tuple(  # of clouds whose instances find credentials elsewhere than at a link-local address
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16",  # Azure, on the internet by its number
            "100.100.100.200",  # Alibaba
            "192.0.0.192",  # Oracle, its classic cloud
            "fd00:c1::a9fe:a9fe",  # Oracle
            "fd00:ec2::/32",  # Amazon: EC2's metadata, the credentials of EKS
            "fd20:ce::254",  # Google
            "fd00:42::42",  # Scaleway
            "fd00:a9fe:a9fe::1",  # Linode
        ),
    )
)
_log = logging.getLogger(__name__)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def connect_outward(host: str, port: int, timeout: float, allow_inner: bool) -> socket.socket:
    """A connection to the host's first address that answers. `allow_inner`: a name may mean private addresses and this
    machine, but never link-local addresses and the others where clouds keep their credentials. A host that is written
    as an address is one that the operator wrote, and is connected to as it is.

    Raises InvalidRequestError if an address may not be connected to, OSError if none answers.
    """
    error: Exception = OSError(f"no address of {host}")
    is_literal = _address_of(host) is not None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, place in found:
        if not is_literal and not _may_be_meant(str(place[0]), host, allow_inner):
            _log.warning("adapter URL: %s is %s, an address that is not on the internet", host, place[0])
            raise _refusal(allow_inner)
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout)
            connection.connect(place)
        except OSError as failure:
            connection.close()
            error = failure
        else:
            return connection
    raise error


def _may_be_meant(text: str, host: str, allow_inner: bool) -> bool:
    address = _address_of(text)
    if address is None:
        return False
    plain = _inside(address)
    if host == "localhost" or host.endswith(".localhost"):
        return plain.is_loopback  # RFC 6761
    if plain.is_link_local or plain.is_multicast or plain.is_unspecified:
        return False
    if any(plain in network for network in _METADATA):
        return False
    return allow_inner or plain.is_global


def _address_of(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])  # without the name of an interface
    except ValueError:
        return None


def _inside(address: Address) -> Address:
    """The address of IPv4 that one of IPv6 stands for, if it stands for one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address


def _refusal(allow_inner: bool) -> InvalidRequestError:
    """The address itself stays in the log: it tells of the operator's network."""
    how = "write the address itself" if allow_inner else "start the server with --adapter-url-inner"
    return refuse(f"The URL's host is not on the internet: to allow it, {how} (--adapter-url).")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one transfer, in seconds."""

    idle: float = 20.0  # to connect, and between two bytes
    headers: float = 30.0  # from a request to the end of the response headers
    total: float = 3600.0  # the whole transfer
    window: float = 60.0  # in each window at least `window_bytes` must arrive
    window_bytes: int = 2**16


DEFAULT_TIMEOUTS = Timeouts()


class TransferClock:
    """Measures one transfer. `timeouts.total` counts from the construction, a window only while bytes are awaited."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._end = self._end_of_phase = time.monotonic() + timeouts.total
        self._waited, self._num_bytes = 0.0, 0  # in this window
        self._has_windows = False

    def begin_headers(self) -> None:
        """Called when a request is sent."""
        self._end_of_phase = min(self._end, time.monotonic() + self._timeouts.headers)
        self._has_windows = False

    def begin_body(self) -> None:
        """Called when the response headers have arrived."""
        self._end_of_phase = self._end
        self._waited, self._num_bytes = 0.0, 0
        self._has_windows = True

    def seconds(self) -> float:
        """The seconds that the next byte may take. Raises AdapterUnavailableError if a limit is exceeded."""
        left = self._end_of_phase - time.monotonic()
        if left <= 0:
            raise AdapterUnavailableError("The source's answer takes too long.")
        if self._has_windows and self._waited >= self._timeouts.window:
            if self._num_bytes < self._timeouts.window_bytes:
                raise AdapterUnavailableError("The source's answer comes too slowly.")
            self._waited, self._num_bytes = 0.0, 0
        return min(self._timeouts.idle, left)

    def heard(self, num_bytes: int, seconds: float) -> None:
        """Called when `num_bytes` arrived after `seconds`."""
        self._num_bytes += num_bytes
        self._waited += seconds


def within(seconds: float, progress: OnBytes) -> OnBytes:
    """`progress`, aborting the transfer once it has taken `seconds`."""
    end = time.monotonic() + seconds

    def limited(num_bytes: int) -> None:
        if time.monotonic() > end:
            raise AdapterUnavailableError("The transfer takes too long.")
        progress(num_bytes)

    return limited


def until(closing: threading.Event, progress: OnBytes) -> OnBytes:
    """`progress`, aborting the transfer once the server closes."""

    def limited(num_bytes: int) -> None:
        if closing.is_set():
            raise NotReadyError("The server is shutting down.")
        progress(num_bytes)

    return limited


class TimedSocket:
    """A socket for `http.client.HTTPResponse` whose every read asks `clock` for its timeout."""

    def __init__(self, sock: socket.socket, clock: TransferClock) -> None:
        self._sock = sock
        self._clock = clock

    def makefile(self, mode: str) -> io.BufferedReader:
        """A stream that keeps the connection open until it is closed itself."""
        return io.BufferedReader(_TimedStream(self._sock, self._clock))


class _TimedStream(io.RawIOBase):
    def __init__(self, sock: socket.socket, clock: TransferClock) -> None:
        super().__init__()
        self._sock = sock
        self._clock = clock
        self._stream: Any = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._sock.settimeout(self._clock.seconds())
        started = time.monotonic()
        try:
            count = int(self._stream.readinto(buffer))
        except TimeoutError:
            self._clock.seconds()  # says so, if it was not the idle
            raise
        self._clock.heard(count, time.monotonic() - started)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
