"""A process that copies a registry until it is killed; imported once, forked for every killing.

Arguments: source folder. Each line on standard input, "<kill_at> <target>", starts a copy that kills itself at its
`kill_at`-th touch of a file, of a folder's database or of Redis; its exit status is printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lora_serve.adapters.maintenance.transfer import Transfer, open_ends
from tests.adapters.registration.registering_process import kill_oneself_at
from tests.registries import at


def run(source: Path, target: str, kill_at: int) -> None:
    with open_ends(at(source), at(target)) as (first, second):
        kill_oneself_at(kill_at, (first if second.address.is_redis else second).catalog)
        assert Transfer(first, second, False, lambda done, total: None).run().is_whole


def main(source: str) -> None:
    for line in sys.stdin:
        kill_at, target = line.split()
        if (child := os.fork()) == 0:
            run(Path(source), target, int(kill_at))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
