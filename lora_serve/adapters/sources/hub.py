"""A repository on the Hugging Face hub, at one commit.

Only allow-listed names are asked for, through the hub's own client with the server's token, if it has one (HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_serve.adapters.regular_file import open_regular, pieces_of
from lora_serve.adapters.sources.base import Checksum, Intake, OnBytes, of_hub, refuse, take_files
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_FORM = re.compile(rf"hf://({_NAME}/{_NAME})((?:/{_NAME})*)/?(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_log = logging.getLogger(__name__)


class HubSource:
    """See AdapterSource. `source`: `hf://org/repo[/folder][@revision]`."""

    def __init__(self, endpoint: str | None = None, timeout: float = 10.0) -> None:
        """`endpoint` None: the client's default. `timeout`: seconds until the first byte of a response."""
        self._endpoint = endpoint
        self._timeout = timeout

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        """The card names the commit of the revision."""
        match = _FORM.fullmatch(source)
        if match is None or ".." in source:
            raise refuse("`source` must be hf://org/repo, hf://org/repo/folder or either with @revision.")
        repo, folder, revision = match[1], match[2].strip("/"), match[3] or "main"
        with _readable_errors(repo), scratch_folder(target.parent) as scratch:
            intake = Intake(target, limit, progress)
            files = _Repository(self._endpoint, self._timeout, repo, folder, revision, scratch, intake)
            take_files(files, intake)
        return f"hf://{repo}{match[2].rstrip('/')}@{files.revision}"


@dataclass(slots=True)
class _Repository:
    """See NamedFiles. The first file determines the commit of `revision`; the other files are read at that commit."""

    endpoint: str | None
    timeout: float
    repo: str
    folder: str
    revision: str
    scratch: Path
    intake: Intake
    bar: type[Any] = field(init=False)
    checksums: dict[str, Checksum | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bar = _bar_of(self.intake)

    def size(self, name: str) -> int | None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415 (seconds; few need it)
        from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

        url = hf_hub_url(self.repo, name, subfolder=self.folder or None, revision=self.revision, endpoint=self.endpoint)
        try:
            found = get_hf_file_metadata(url, timeout=self.timeout, endpoint=self.endpoint)
        except EntryNotFoundError:
            return None
        if found.size is None or not _COMMIT.fullmatch(found.commit_hash or ""):
            raise AdapterUnavailableError("The hub does not say the file's size and commit; is HF_ENDPOINT a hub?")
        self.revision = str(found.commit_hash)
        self.checksums[name] = of_hub(found.etag)
        return int(found.size)

    def chunks(self, name: str) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415

        path = Path(
            hf_hub_download(
                self.repo,
                name,
                subfolder=self.folder or None,
                revision=self.revision,
                endpoint=self.endpoint,
                cache_dir=self.scratch / "cache",
                local_dir=self.scratch / "files",
                etag_timeout=self.timeout,
                tqdm_class=self.bar,
            )
        )
        with open_regular(path) as file:
            yield from pieces_of(file)
        path.unlink()

    def checksum(self, name: str) -> Checksum | None:
        return self.checksums[name]


def _bar_of(intake: Intake) -> type[Any]:
    """A progress bar that shows nothing: the client reports the progress of a download in no other way."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    base: Any = tqdm  # untyped

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            intake.beat()
            return None

    return Bar


@contextmanager
def _readable_errors(repo: str) -> Iterator[None]:
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except LoraServeError:
        raise
    except errors.GatedRepoError:
        raise refuse(f"{repo} is gated, and the server's token (HF_TOKEN) may not read it.") from None
    except errors.RevisionNotFoundError:
        raise refuse(f"{repo} has no such revision.") from None
    except errors.RepositoryNotFoundError:
        raise refuse(f"The hub has no {repo}, or the server's token (HF_TOKEN) may not read it.") from None
    except errors.OfflineModeIsEnabled:
        raise AdapterUnavailableError("The server may not use the hub: it runs with HF_HUB_OFFLINE.") from None
    except errors.HfHubHTTPError as error:
        raise _of_status(repo, error) from None
    except Exception as error:  # exceptions of the client's HTTP library
        raise _unreachable(error) from None


def _of_status(repo: str, error: Any) -> LoraServeError:
    status = error.response.status_code
    if status in (401, 403):
        return refuse(f"The hub answers with status {status}: the server's token (HF_TOKEN) may not read {repo}.")
    return _unreachable(error)


def _unreachable(error: Exception) -> AdapterUnavailableError:
    _log.warning("hub: %r", error)
    return AdapterUnavailableError(f"The hub cannot be reached, or broke off ({type(error).__name__}); try again.")
