"""Installs peers, each into an environment of its own under .benchmarks/peers/, and tells which are there.

python -m benchmarks.peers list
python -m benchmarks.peers install vllm llama_cpp
python -m benchmarks.peers check llama_cpp-f32      the same greedy tokens as PEFT on a small model?
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.peers.check import check
from benchmarks.peers.processes import end_on_sigterm
from benchmarks.peers.seam import Peer, PeerError
from benchmarks.peers.table import ALL, families, members


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every peer with its versions, or what is missing")
    install = commands.add_parser("install", help="make what a peer needs; minutes, once")
    install.add_argument("names", nargs="+", choices=families())
    checked = commands.add_parser("check", help="whether an engine computes what PEFT computes")
    checked.add_argument("names", nargs="+", choices=[peer.name for peer in ALL])
    options = parser.parse_args(arguments)
    if options.command == "check":
        return 0 if all(_check(members(name)[0]) for name in options.names) else 1
    names = families() if options.command == "list" else options.names
    results = [_tell(name, members(name)[0], is_to_install=options.command == "install") for name in names]
    return 0 if options.command == "list" or all(results) else 1


def _tell(name: str, peer: Peer, *, is_to_install: bool) -> bool:
    """Whether it is there, with a line about it."""
    try:
        if is_to_install:
            peer.install()
        versions = ", ".join(f"{package} {version}" for package, version in peer.versions().items())
    except PeerError as error:
        print(f"{name:14} missing: {error}", flush=True)
        return False
    print(f"{name:14} {versions}", flush=True)
    return True


def _check(peer: Peer) -> bool:
    """Whether nearly all answers are PEFT's: where two logits are equal to 4 digits, rounding decides."""
    try:
        shares = check(peer)
    except PeerError as error:
        print(f"{peer.name:22} {error}", flush=True)
        return False
    told = ", ".join(f"{popularity} {share:.0%}" for popularity, share in shares.items())
    print(f"{peer.name:22} requests with all of PEFT's tokens: {told}", flush=True)
    return min(shares.values()) >= 0.9


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
