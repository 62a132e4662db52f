"""Several hosts on one machine: network namespaces on a bridge, any two of which can be cut apart in silence. For root.

A cut is two ports of the bridge that are isolated from one another: frames between them are dropped, nobody is told,
and the rest, this process among them, goes on reaching both. Each host's neighbours are fixed in its table, so a host
that is cut off is not found out by ARP either: to TCP it is a peer that says nothing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

_NUMBERS = 200  # networks of one machine that do not meet, by the process's id


@dataclass
class Network:
    """Hosts by name; each is a namespace with an address of its own, and this process's is `own_address`."""

    addresses: dict[str, str]
    own_address: str
    prefix: str  # of the names of namespaces and ports
    _cut: tuple[str, ...] = field(default=())

    def inside(self, host: str) -> list[str]:
        """What to put before a command that is to run on the host."""
        return ["ip", "netns", "exec", self.prefix + host]

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """While the block lasts, whatever one host sends the other is dropped, both ways. One cut at a time: of two,
        each host of the one would be cut from each of the other as well.
        """
        assert not self._cut, f"{self._cut} are cut apart already"
        self._cut = (one, other)
        self._isolate("on")
        try:
            yield
        finally:
            self._isolate("off")
            self._cut = ()

    def _isolate(self, word: str) -> None:
        for host in self._cut:
            run("ip", "link", "set", self.prefix + host, "type", "bridge_slave", "isolated", word)


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """Make the hosts, and remove them. Names have three letters at most. Raises RuntimeError in words."""
    number = os.getpid() % _NUMBERS
    prefix, subnet = f"f{os.getpid()}", f"10.213.{number}"
    made = Network({host: f"{subnet}.{index}" for index, host in enumerate(hosts, 1)}, f"{subnet}.254", prefix)
    bridge = f"{prefix}br"
    with ExitStack() as stack:
        run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{made.own_address}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for host, address in made.addresses.items():
            run("ip", "netns", "add", prefix + host)
            stack.callback(run, "ip", "netns", "del", prefix + host)
            _connect(made, host, address, bridge)
        _introduce(made)
        yield made


def _connect(made: Network, host: str, address: str, bridge: str) -> None:
    port, space = made.prefix + host, made.prefix + host
    run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
    run("ip", "link", "set", port, "master", bridge, "up")
    for words in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address}/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["route", "add", "default", "via", made.own_address],  # by which Ray finds a host's own address
    ):
        run("ip", "-n", space, *words)


def _introduce(made: Network) -> None:
    """Everybody knows everybody's hardware address for good."""
    found = {host: run(*made.inside(host), "cat", "/sys/class/net/eth0/address").strip() for host in made.addresses}
    for host in made.addresses:
        for other, hardware in found.items():
            if other != host:
                told = [
                    "neigh",
                    "replace",
                    made.addresses[other],
                    "lladdr",
                    hardware,
                    "dev",
                    "eth0",
                    "nud",
                    "permanent",
                ]
                run("ip", "-n", made.prefix + host, *told)


def run(*command: str) -> str:
    """What the command says. Raises RuntimeError with its words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
