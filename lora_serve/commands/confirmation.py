"""Asks before what cannot be undone."""

from __future__ import annotations

import sys

from lora_serve.commands.failure import CommandError, ExitCode


def confirm_deletion(is_sure: bool, what: str) -> None:
    """Asks whether `what` is to go, unless `is_sure` (--yes).

    Raises CommandError if the answer is not yes, and where input is no terminal, so that there is nobody to ask.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise CommandError(ExitCode.REFUSED, f"nothing was deleted: input is no terminal, so only --yes deletes {what}")
    sys.stderr.write(f"Delete {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(ExitCode.REFUSED, "nothing was deleted")
