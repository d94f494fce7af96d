"""The tables of all brokers of a region, read as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from control_plane.api.machines import MachineRecord
from control_plane.broker.broker import Broker
from wire.errors import NotFound


class RegionTable:
    """The tables of all brokers, read as one."""

    def __init__(self, brokers: Mapping[str, Broker]) -> None:
        """`brokers` may grow later."""
        self._brokers = brokers
        self._names: tuple[list[tuple[str, ...]], tuple[str, ...]] = ([], ())

    def broker_of(self, name: str) -> Broker | None:
        """Return the broker of a machine."""
        for broker in self._brokers.values():
            if name in broker.table:
                return broker
        return None

    def find(self, name: str) -> MachineRecord | None:
        """Return the record, if there is one."""
        for broker in self._brokers.values():
            record = broker.table.find(name)
            if record is not None:
                return record
        return None

    def get(self, name: str) -> MachineRecord:
        """Return the record, or raise `NotFound`."""
        record = self.find(name)
        if record is None:
            raise NotFound(f"there is no machine {name!r}")
        return record

    def names(self) -> tuple[str, ...]:
        """Return all names, in order."""
        parts = [broker.table.names() for broker in self._brokers.values()]
        if len(parts) == 1:
            return parts[0]
        known, merged = self._names
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            merged = tuple(sorted(chain.from_iterable(parts)))  # sorts sorted runs in one pass
            self._names = (parts, merged)
        return merged

    def after(self, name: str) -> Iterator[str]:
        """Yield the names that come after this one, in order."""
        names = self.names()
        return islice(names, bisect_right(names, name), None)

    def __iter__(self) -> Iterator[str]:
        """Yield all names, in order."""
        return iter(self.names())

    def __len__(self) -> int:
        """Return how many machines there are."""
        return sum(len(broker.table) for broker in self._brokers.values())

    def records(self) -> list[MachineRecord]:
        """Return all records, by name."""
        return [self.get(name) for name in self]

    def revision(self, name: str) -> int:
        """Return the store revision of a machine, 0 if there is none."""
        home = self.broker_of(name)
        return 0 if home is None else home.table.revision(name)
