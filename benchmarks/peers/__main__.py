"""Installs peers, each into an environment of its own under .benchmarks/peers/, and tells which are there.

python -m benchmarks.peers list
python -m benchmarks.peers install vllm llama_cpp
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.peers.seam import Peer, PeerError
from benchmarks.peers.table import families, members


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every peer with its versions, or what is missing")
    install = commands.add_parser("install", help="make what a peer needs; minutes, once")
    install.add_argument("names", nargs="+", choices=families())
    options = parser.parse_args(arguments)
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


if __name__ == "__main__":
    sys.exit(main())
