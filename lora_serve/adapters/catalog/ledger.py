"""A journal's records as an immutable state, which commits replace as a whole.

Readers on any thread take `state`. Edits, and the follower that brings in what other replicas wrote, share one lock.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from lora_serve.adapters.catalog.journals.base import Journal, Page, Position
from lora_serve.core.errors import AdapterUnavailableError, RequestError, StoreUnwritableError
from lora_serve.core.process import without_collections

Changes = dict[str, str | None]
T = TypeVar("T")
_MAX_TRIES = 50  # commits of other replicas that may come first
_LONGEST_WAIT = 1.0  # seconds without a notice, after which the journal is read anyway
_PAUSE = 0.25  # seconds between two attempts
_log = logging.getLogger(__name__)


class JournaledState(Protocol):
    """The meaning of the records; immutable."""

    @property
    def position(self) -> Position: ...

    def after(self, page: Page) -> Self:
        """The state once these records have changed."""


S = TypeVar("S", bound=JournaledState)
S_contra = TypeVar("S_contra", bound=JournaledState, contravariant=True)


class CommitObserver(Protocol[S_contra]):
    """Called at every change of the state, under the ledger's lock, with the keys of the changed records."""

    def staged(
        self, before: S_contra, after: S_contra, keys: Collection[str]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Entered before a commit; yields what is called after it. Raises AdapterUnavailableError to prevent it."""

    def followed(self, before: S_contra, after: S_contra, keys: Collection[str] | None) -> None:
        """Called when others' commits were brought in; `keys` None: all records were read anew."""


class _NoObserver:
    @contextmanager
    def staged(self, before: Any, after: Any, keys: Collection[str]) -> Iterator[Callable[[], None]]:
        yield lambda: None

    def followed(self, before: Any, after: Any, keys: Collection[str] | None) -> None:
        pass


@dataclass(slots=True)
class _WaitingEdit(Generic[S]):
    edit: Callable[[S], tuple[Changes, Any]]
    outcome: Callable[[], Any] | None = None  # returns the result of the edit, or raises


def _same(result: Any) -> Any:
    return result


def _raise(error: BaseException) -> Any:
    raise error


class Ledger(Generic[S]):
    """One journal. Every method may be called from any thread."""

    def __init__(self, journal: Journal, empty: S, title: str) -> None:
        """`empty`: the state of a journal without records. `title`: names the journal in messages.

        Raises AdapterUnavailableError.
        """
        self.journal = journal
        self.num_losses = 0  # times that the journal had, or may have, lost records: they were read anew or given back
        self.title = title
        self.observer: CommitObserver[S] = _NoObserver()
        self._empty = empty
        self._lock = threading.RLock()
        self._num_held = 0  # blocks of `held` on the thread that has the lock
        self._waiting: list[_WaitingEdit[S]] = []  # edits; each is appended by its own thread
        self._listeners: list[Callable[[], object]] = []
        self._listeners_lock = threading.Lock()  # they come and go on the event loop, which waits for no commit
        self._away_since: float | None = None
        self.problem: str | None = None  # why the last read or commit failed
        self._state = self._read_anew()

    @property
    def state(self) -> S:
        """The newest known state."""
        return self._state

    @property
    def is_away(self) -> bool:
        """True if the journal cannot be reached, so that others' changes are unknown."""
        return self._away_since is not None

    @property
    def seconds_away(self) -> float:
        """How long the journal has been away; 0: it is not."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def change(self, edit: Callable[[S], tuple[Changes, T]]) -> T:
        """Commit the changes that `edit` returns for the newest state; it is called again if another replica was first.

        Edits that wait for the same lock are committed together: one of their threads makes them one after another and
        writes all of them durably at once, before any of them returns. Without changes nothing is committed. That
        nothing is to be changed, or that the edit is refused, is true of the newest state; while the journal is away a
        refusal is of the last known one. Raises AdapterUnavailableError, and what `edit` raises.
        """
        own = _WaitingEdit[S](edit)
        self._waiting.append(own)
        with self._lock:
            if own.outcome is None:
                self._change_together([own] if self._num_held or self.is_away else list(self._waiting))
        assert own.outcome is not None
        return cast(T, own.outcome())

    def _change_together(self, edits: list[_WaitingEdit[S]]) -> None:
        try:
            self._make(edits)
        except BaseException as error:
            if len(edits) > 1 and isinstance(error, StoreUnwritableError):  # perhaps there is room for some of them
                for one in edits:
                    self._change_together([one])
                return
            for one in edits:
                one.outcome = partial(_raise, error)
        finally:
            for one in edits:
                with suppress(ValueError):
                    self._waiting.remove(one)

    def _make(self, edits: list[_WaitingEdit[S]]) -> None:
        """Give every edit its outcome, or none. Raises AdapterUnavailableError."""
        is_newest = False
        for _ in range(_MAX_TRIES):
            position, state = self._next_position(), self._state
            changes, outcomes, is_open = Changes(), list[Callable[[], Any]](), False
            for one in edits:
                try:
                    own, result = one.edit(state)
                except Exception as error:
                    outcomes.append(partial(_raise, error))
                    is_open = is_open or (isinstance(error, RequestError) and not self.is_away)
                    continue
                outcomes.append(partial(_same, result))
                is_open = is_open or not own  # true of the state here; is that the newest?
                if own:
                    state = state.after(Page(position, own))
                    changes |= own
            if changes and self.is_away:  # the follower notes when it is back; until then no edit waits for a timeout
                raise AdapterUnavailableError(str(self.problem), retry_after=5)
            if changes and not self._commit(changes, state):
                self._refresh()
            elif is_open and not changes and not is_newest:
                self.refresh()  # no commit has shown whether another replica has changed it
                is_newest = True
            else:
                for one, outcome in zip(edits, outcomes, strict=True):
                    one.outcome = outcome
                return
        raise AdapterUnavailableError(f"The {self.title} is being changed by too many at once; try again.")

    @contextmanager
    def locked(self) -> Iterator[S]:
        """The newest known state, which only the block itself changes while it lasts."""
        with self._lock:
            self._num_held += 1
            try:
                yield self._state
            finally:
                self._num_held -= 1

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener`, on whichever thread, after each change of the state."""
        with self._listeners_lock:
            self._listeners = [*self._listeners, listener]

    def unlisten(self, listener: Callable[[], object]) -> None:
        with self._listeners_lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def wait(self, seconds: float) -> None:
        """Return once other replicas may have written, or after `seconds`. Raises AdapterUnavailableError."""
        self.journal.wait(self._state.position, seconds)

    def refresh(self) -> None:
        """Bring in what other replicas wrote. Raises AdapterUnavailableError."""
        with self._lock:
            try:
                self._refresh()
            except AdapterUnavailableError as error:
                self.problem = str(error)
                self._away_since = self._away_since or time.monotonic()
                raise
            if self.is_away:
                self.problem = self._away_since = None

    def forget(self) -> None:
        """Erase the remains of deleted records from the journal. Raises AdapterUnavailableError."""
        with self._lock:
            self.journal.forget()

    def close(self) -> None:
        self.journal.close()

    def _next_position(self) -> Position:
        position = self._state.position
        return Position(position.epoch or uuid.uuid4().hex, position.generation + 1, uuid.uuid4().hex)

    def _commit(self, changes: Mapping[str, str | None], after: S) -> bool:
        before = self._state
        with self.observer.staged(before, after, changes.keys()) as made:
            try:
                if self.journal.commit(before.position, changes, after.position) is None:
                    return False
            except AdapterUnavailableError as error:
                self.problem = str(error)
                raise
            self.problem = None
            self._publish(after)
            made()
        return True

    def _refresh(self) -> None:
        before = self._state
        page = None if self.is_away else self.journal.since(before.position)
        if page is None:
            self._publish(self._read_anew())
            self.num_losses += 1
            self.observer.followed(before, self._state, None)
        elif page.position != before.position:
            self.num_losses += not page.records  # a commit without changes: another replica gave back what was lost
            self._publish(before.after(page))
            self.observer.followed(before, self._state, page.records.keys())

    def _read_anew(self) -> S:
        with without_collections():  # over objects that stay: half of the time at 100 000 records
            return self._empty.after(self.journal.load())

    def _publish(self, state: S) -> None:
        self._state = state
        for listener in self._listeners:
            listener()


class Follower:
    """Keeps the state of a shared journal's ledger up to date until `close`."""

    def __init__(self, followed: Ledger[Any], returned: Callable[[], None], title: str = "adapter registry") -> None:
        """`returned` is called on this thread once at first, and whenever the journal is back or has lost records.

        If it raises anything, it is soon called again.
        """
        self._followed = followed
        self._returned = returned
        self._title = title
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{title} follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, within a few seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        problem, num_losses = None, -1
        while not self._stopping.is_set():
            is_away, before = not self._succeeds(self._follow), problem
            problem = self._followed.problem if is_away else None
            if problem != before:
                what = f"is away; what is known here is served: {problem}" if problem else "is back"
                _log.warning("the shared %s %s", self._title, what)
            newest = self._followed.num_losses
            if is_away or (num_losses != newest and not self._succeeds(self._returned)):
                self._stopping.wait(_PAUSE)
            else:
                num_losses = newest

    def _follow(self) -> None:
        """Waits for others' commits and brings them in. Raises AdapterUnavailableError if the journal is away."""
        if not self._followed.is_away:
            with suppress(AdapterUnavailableError):  # the refresh fails likewise, and notes it
                self._followed.wait(_LONGEST_WAIT)
        self._followed.refresh()

    def _succeeds(self, act: Callable[[], None]) -> bool:
        """False if it raised anything, which must not end the thread unseen."""
        try:
            act()
        except AdapterUnavailableError:
            return False
        except Exception:
            _log.exception("the follower met a bug and goes on")
            return False
        return True
