"""Connections of sources to hosts by name, which must not lead into the operator's own network by accident.

A name is resolved once; its addresses are checked, and one of these very addresses is connected to. A DNS that answers
otherwise a moment later changes nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import socket

from lora_serve.adapters.sources.base import refuse
from lora_serve.core.errors import InvalidRequestError

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
