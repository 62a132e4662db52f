"""What the registry must answer, in plain dicts and lists: written from the contract, using nothing of the program.

Contents are numbers. A method that changes something returns the HTTP status that the change must get, and changes
nothing unless that is 200 or 201.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_HISTORY = 20
Meaning = set[tuple[str, int]]  # (id, version) of those that may answer


@dataclass
class Adapter:
    """One id. `versions`: number -> content."""

    pinned: bool
    versions: dict[int, int]
    last_version: int = 1
    route: int = 1
    canary: tuple[int, float] | None = None  # version, percent
    history: list[int] = field(default_factory=list)

    def number_of(self, content: int) -> int | None:
        return next((number for number, known in self.versions.items() if known == content), None)

    @property
    def routed(self) -> list[int]:
        """Version numbers that the bare id may mean."""
        return [self.route] if self.canary is None else [self.route, self.canary[0]]

    def point_to(self, version: int, canary: tuple[int, float] | None) -> None:
        if version != self.route:
            self.history = [*(old for old in self.history if old != version), self.route][-MAX_HISTORY:]
        self.route, self.canary = version, canary

    def lose(self, version: int) -> None:
        """A version other than the last goes."""
        del self.versions[version]
        self.history = [old for old in self.history if old != version]
        if self.canary is not None and self.canary[0] == version:
            self.canary = None
        if self.route == version:
            self.route = self.history.pop() if self.history else max(self.versions)
            if self.canary is not None and self.canary[0] == self.route:
                self.canary = None


@dataclass
class Expected:
    """Everything that was acknowledged. `shares`: for (id, canary version, user) what is known of the place of this
    user between 0 and 100: at least the first, below the second.
    """

    adapters: dict[str, Adapter] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shares: dict[tuple[str, int, str], tuple[float, float]] = field(default_factory=dict)

    # -- changes -----------------------------------------------------------------------------------------------

    def register(self, name: str, content: int, activate: bool, pin: bool) -> int:
        if name in self.aliases:
            return 409
        adapter = self.adapters.get(name)
        if adapter is None:
            self.adapters[name] = Adapter(pin, {1: content})
            return 201
        adapter.pinned = adapter.pinned or pin
        number, status = adapter.number_of(content), 200
        if number is None:
            adapter.last_version += 1
            number, status = adapter.last_version, 201
            adapter.versions[number] = content
        if activate:
            adapter.point_to(number, None)
        return status

    def set_route(self, name: str, version: int | None, canary: tuple[int, float] | None) -> int:
        adapter = self.adapters.get(name)
        if adapter is None:
            return 404
        new = adapter.route if version is None else version
        if new not in adapter.versions or (canary is not None and canary[0] not in adapter.versions):
            return 400
        if canary is not None and canary[0] == new:
            return 400
        adapter.point_to(new, canary)
        return 200

    def roll_back(self, name: str) -> int:
        adapter = self.adapters.get(name)
        if adapter is None:
            return 404
        if adapter.canary is not None:
            adapter.canary = None
        elif adapter.history:
            adapter.route = adapter.history.pop()
        else:
            return 409
        return 200

    def delete(self, name: str, version: int | None) -> int:
        adapter = self.adapters.get(name)
        if adapter is None or version not in (None, *adapter.versions):
            return 404
        if version is None or len(adapter.versions) == 1:
            del self.adapters[name]
            self.shares = {key: share for key, share in self.shares.items() if key[0] != name}
        elif version == adapter.route and not adapter.history:
            return 409  # nobody has chosen what the id means then
        else:
            adapter.lose(version)
        self.aliases = {alias: target for alias, target in self.aliases.items() if self.meaning_of(target) is not None}
        return 200

    def set_alias(self, alias: str, target: str) -> int:
        if alias in self.adapters:
            return 409
        if target.partition("@")[0] in self.aliases or self.meaning_of(target) is None:
            return 404
        self.aliases[alias] = target
        return 200

    def remove_alias(self, alias: str) -> int:
        return 200 if self.aliases.pop(alias, None) is not None else 404

    def set_pinned(self, name: str, pinned: bool) -> int:
        if name not in self.adapters:
            return 404
        self.adapters[name].pinned = pinned
        return 200

    # -- questions ---------------------------------------------------------------------------------------------

    def meaning_of(self, name: str, user: str | None = None) -> Meaning | None:
        """Which versions may answer to a name; more than one only where chance, or a side not seen yet, decides.

        A selector is a version number or `content:N`, which stands for that content's digest. None: 404.
        """
        first, at, selector = name.partition("@")
        if first in self.aliases:
            first, own_at, own = self.aliases[first].partition("@")
            if own_at and at:
                return None
            at, selector = at or own_at, selector or own
        adapter = self.adapters.get(first)
        if adapter is None:
            return None
        if at:
            return _selected(first, adapter, selector)
        return {(first, version) for version in self._sides(first, adapter, user)}

    def learn(self, user: str, answered: tuple[str, int]) -> None:
        """A user asked for a bare id, or an alias of one, and this answered: so it must be from now on."""
        adapter = self.adapters[answered[0]]
        if adapter.canary is None:
            return
        version, percent = adapter.canary
        key = (answered[0], version, user)
        low, high = self.shares.get(key, (0.0, 100.0))
        self.shares[key] = (low, min(high, percent)) if answered[1] == version else (max(low, percent), high)

    def contents_of(self, name: str, versions: list[int]) -> set[int]:
        return {self.adapters[name].versions[version] for version in versions}

    @property
    def named(self) -> set[int]:
        """Contents that any version names."""
        return {content for adapter in self.adapters.values() for content in adapter.versions.values()}

    @property
    def pinned(self) -> set[int]:
        """Contents that must be on the device."""
        names = [name for name, adapter in self.adapters.items() if adapter.pinned]
        return {content for name in names for content in self.contents_of(name, self.adapters[name].routed)}

    def _sides(self, name: str, adapter: Adapter, user: str | None) -> list[int]:
        if adapter.canary is None:
            return [adapter.route]
        version, percent = adapter.canary
        low, high = (0.0, 100.0) if user is None else self.shares.get((name, version, user), (0.0, 100.0))
        if percent <= low:
            return [adapter.route]
        return [version] if percent >= high else [adapter.route, version]


def _selected(name: str, adapter: Adapter, selector: str) -> Meaning | None:
    kind, colon, number = selector.partition(":")
    version = adapter.number_of(int(number)) if colon else int(kind)
    return {(name, version)} if version in adapter.versions else None
