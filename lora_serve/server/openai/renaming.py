"""Errors of a chat in the words of the API that was called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lora_serve.core.errors import InvalidRequestError


@contextmanager
def with_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of a chat in errors. `names`: a chat's, longer ones first -> the caller's."""
    try:
        yield
    except InvalidRequestError as error:
        raise _renamed(error, names) from error


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """In the name of the field, and in the message where it stands in backquotes or is advised to be lowered."""
    message, param = str(error), error.param or ""
    for old, new in names.items():
        whole = re.escape(old) + ("" if old.endswith(".") else r"(?!\w)")
        message = re.sub(rf"(?<=[`\]]){whole}|(?<=lower ){whole}", new, message)
        param = re.sub(whole if old.startswith(".") else f"^{whole}", new, param)
    return InvalidRequestError(message, param=param or None, code=error.code)
