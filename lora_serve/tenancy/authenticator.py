"""Authorization header -> Caller, and the times at which keys were last used."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_serve.core.errors import AuthenticationError, ForbiddenError, WrongKeyError, WrongKeysError
from lora_serve.core.tenant import ADMIN_CALLER, CLIENT_CALLER, LOCAL_CALLER, Caller, Role
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.directory import Directory
from lora_serve.tenancy.directory_state import EXPIRED, KEY, REVOKED, TENANT, WRONG, id_in, opens
from lora_serve.tenancy.rate_limiter import WINDOW, WindowCount

MISSING = "No API key was sent. Send it as a header: `Authorization: Bearer KEY`."


class KeyTable:
    """Secret -> Caller, by the directory's snapshot alone: asked on the event loop's thread for every request."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._uses: dict[str, float] = {}  # since they were last taken

    def caller(self, secret: str) -> Caller:
        """The caller whose secret this is. Raises WrongKeyError; AuthenticationError for a key that has ended;
        UnreadableRecordError if the record of its tenant cannot be read.
        """
        state, now = self.directory.snapshot, self.directory.clock()
        key = state.keys.get(id_in(secret) or "")
        if not opens(key, secret) or key is None:
            raise WrongKeyError(WRONG)
        tenant = state.tenants.get(key.tenant)
        if key.revoked is None and key.is_valid(now):
            state.check_held(TENANT, key.tenant)
        if key.revoked is not None or tenant is None:
            raise AuthenticationError(REVOKED)
        if not key.is_valid(now):
            raise AuthenticationError(EXPIRED)
        self._uses[key.id] = now
        is_admin = key.role is Role.ADMIN
        may_use_base = tenant.may_use_base or is_admin
        return Caller(
            key.tenant, key.role, key.id, tenant.quota, key.quota, may_use_base, is_admin, since=tenant.created
        )

    def last_used(self, key_id: str) -> float | None:
        """Unix seconds; None: never. Uses at other replicas are known within a minute."""
        known = [self._uses.get(key_id), self.directory.snapshot.last_used(key_id)]
        return max((time for time in known if time is not None), default=None)

    def take_uses(self) -> dict[str, float]:
        """The uses since the last call, for the directory."""
        uses, self._uses = self._uses, {}
        return uses

    def give_back(self, uses: Mapping[str, float]) -> None:
        """Takes uses back that could not be written."""
        self._uses = {**uses, **self._uses}


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Turns the header into a caller. `required`: inference needs a key too; the admin API always needs one.

    `keys`: the tenants' keys; None: there are none. `client_keys`: keys of one tenant that uses everybody's adapters.
    """

    admin_key: AdminKey
    required: bool
    keys: KeyTable | None = None
    client_keys: tuple[AdminKey, ...] = ()

    def inference(self, authorization: str | None) -> Caller:
        """The caller of an inference request. Raises AuthenticationError, ForbiddenError."""
        return _at_least(Role.INFERENCE, self.authenticate(authorization)) if self.required else LOCAL_CALLER

    def metrics(self, authorization: str | None) -> Caller:
        """A caller that may read all names in /metrics. Raises AuthenticationError, ForbiddenError."""
        return _at_least(Role.METRICS, self.authenticate(authorization))

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller that the key belongs to. Raises AuthenticationError, UnreadableRecordError."""
        scheme, _, text = (authorization or "").partition(" ")
        secret = text.strip()
        if scheme.lower() != "bearer" or not secret:
            raise AuthenticationError(MISSING)
        if self.admin_key.matches(secret):
            return ADMIN_CALLER
        if any(key.matches(secret) for key in self.client_keys):
            return CLIENT_CALLER
        if self.keys is None:
            raise WrongKeyError(WRONG)
        self.keys.directory.snapshot.check_held(KEY, id_in(secret) or "")  # which may be this caller's
        return self.keys.caller(secret)

    def managing(self, authorization: str | None) -> Caller:
        """A caller that may change adapters or keys, perhaps of one tenant only.

        Raises AuthenticationError, ForbiddenError.
        """
        return _at_least(Role.TENANT_ADMIN, self.authenticate(authorization))

    def admin(self, authorization: str | None) -> Caller:
        """A caller with the role admin. Raises AuthenticationError, ForbiddenError."""
        return _at_least(Role.ADMIN, self.authenticate(authorization))


def _at_least(role: Role, caller: Caller) -> Caller:
    if not caller.role.includes(role):
        raise ForbiddenError(f"This needs a key of the role {role}; the one that was sent is for {caller.role}.")
    return caller


def auth_required(auth: str, host: str) -> bool:
    """True if inference needs a key: `on`, or `auto` on any address but loopback."""
    if auth == "auto":
        return not is_loopback(host)
    return auth == "on"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


MAX_ADDRESSES = 4096  # that are remembered, those that sent the last ones
_IPV6_SITE = 64  # bits: what one customer of a network has at least
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _AddressCounts:
    minute: int
    previous: int = 0
    current: int = 0
    is_told: bool = False  # in the log

    def turn_to(self, minute: int) -> None:
        if minute == self.minute:
            return
        self.previous = self.current if minute == self.minute + 1 else 0
        self.minute, self.current, self.is_told = minute, 0, False


class WrongKeys:
    """Counts wrong keys by address. Used on the event loop's thread only."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: within a minute; 0: any number. `clock`: seconds."""
        self._limit = limit
        self._clock = clock
        self._counts: OrderedDict[str, _AddressCounts] = OrderedDict()  # the last to send one last

    def note(self, address: str) -> None:
        """Counts a wrong key from the address. Raises WrongKeysError beyond the limit."""
        if self._limit == 0:
            return
        minute, seconds = divmod(self._clock(), WINDOW)
        counts = self._of(site_of(address), int(minute))
        elapsed = seconds / WINDOW
        if WindowCount(counts.previous, counts.current + 1, elapsed).is_within(self._limit):
            counts.current += 1
            return
        wait = WindowCount(counts.previous, counts.current, elapsed).seconds_until(self._limit, 1)
        if not counts.is_told:
            counts.is_told = True
            _log.warning("%d wrong keys within a minute from %s; more are refused with 429", self._limit, address)
        raise WrongKeysError(
            f"The API key is not valid, and {self._limit} that are not came from your address within a minute. "
            f"Try again in {wait:.1f} s, with another key.",
            wait,
        )

    def _of(self, site: str, minute: int) -> _AddressCounts:
        counts = self._counts.setdefault(site, _AddressCounts(minute))
        self._counts.move_to_end(site)
        if len(self._counts) > MAX_ADDRESSES:
            self._counts.popitem(last=False)
        counts.turn_to(minute)
        return counts


def site_of(address: str) -> str:
    """The part of an address that names one customer of a network: all of IPv4, the first half of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _IPV6_SITE), strict=False))
