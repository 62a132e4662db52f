"""Hosts on one machine: each reaches the others, and a cut between two of them is silent and heals."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from benchmarks.fleet.namespaces import Network, network

pytestmark = pytest.mark.nightly  # makes network namespaces, for which one must be root

LISTEN = """
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)
with socketserver.ThreadingTCPServer(("", 7000), Echo) as server:
    server.daemon_threads = True
    print("up", flush=True)
    server.serve_forever()
"""
ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000), 5)
print("connected", flush=True)
for line in sys.stdin:
    connection.settimeout(float(line))
    connection.sendall(b"x")
    try:
        print("answer" if connection.recv(100) else "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


class Talk:
    """A client on one host with a connection to a server on another."""

    def __init__(self, hosts: Network, one: str, other: str) -> None:
        self._client = python(hosts, one, ASK, hosts.addresses[other])
        assert self.line() == "connected"

    def ask(self, patience: float) -> str:
        assert self._client.stdin is not None
        self._client.stdin.write(f"{patience}\n")
        self._client.stdin.flush()
        return self.line()

    def line(self) -> str:
        assert self._client.stdout is not None
        return self._client.stdout.readline().strip()

    def end(self) -> None:
        self._client.kill()
        self._client.communicate()


def python(hosts: Network, host: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*hosts.inside(host), "python3", "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(("a", "b", "c")) as made:
        servers = [python(made, host, LISTEN) for host in made.addresses]
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline().strip() == "up"
        yield made
        for server in servers:
            server.kill()
            server.communicate()


@pytest.fixture
def talks(hosts: Network) -> Iterator[dict[str, Talk]]:
    found = {one + other: Talk(hosts, one, other) for one in "abc" for other in "abc" if one != other}
    yield found
    for talk in found.values():
        talk.end()


def test_cut_is_silent_between_two_hosts_and_nobody_else_notices(hosts: Network, talks: dict[str, Talk]) -> None:
    assert {name: talk.ask(5) for name, talk in talks.items()} == dict.fromkeys(talks, "answer")
    with hosts.cut("a", "b"):
        found = {name: talk.ask(0.3 if name in ("ab", "ba") else 5) for name, talk in talks.items()}
    assert found == {name: "silence" if name in ("ab", "ba") else "answer" for name in talks}
    assert talks["ab"].ask(10) == "answer"  # the connection lived on, and what was sent meanwhile arrives
    assert talks["ba"].ask(10) == "answer"
