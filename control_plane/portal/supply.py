"""Counts the region's machines of each class, and follows the changes of their records."""

from __future__ import annotations

from collections import Counter

from control_plane.api.machines import MachineRecord
from control_plane.broker.core.capacity import micro
from control_plane.portal.core.grants import MachineClass, Supply, is_leaving, rru_of

_Key = tuple[str, str, float, str]
"""Machine type, data center, RRU, region."""


class SupplyIndex:
    """The present counts: a grant is checked against them without reading all machines."""

    def __init__(self) -> None:
        """Start with no machines; the broker reports each machine when it is loaded."""
        self._counts: dict[_Key, int] = {}
        self._profiles = Counter[tuple[str, ...]]()
        """Installed host profiles → number of machines whose agents report these."""

    def on_machine_change(
        self, _: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Count the change of one machine; called a million times during loading."""
        if before is not None and after is not None and _is_class_unchanged(before, after):
            return
        self._profiles.update(_installed(after))
        self._profiles.subtract(_installed(before))
        was = None if before is None else _key(before)
        now = None if after is None else _key(after)
        if was == now:
            return
        if now is not None:
            self._counts[now] = self._counts.get(now, 0) + 1
        if was is not None:
            self._counts[was] -= 1
            if not self._counts[was]:
                del self._counts[was]

    def profiles(self) -> frozenset[str]:
        """Return the host profiles of all machines; empty while some agent does not report any."""
        found = +self._profiles
        return (
            frozenset[str]()
            if () in found
            else frozenset(name for names in found for name in names)
        )

    def counts(self) -> Supply:
        """Return the number of machines of each class; empty if the region has no machines."""
        found: Counter[MachineClass] = Counter()
        for (machine_type, datacenter, rru, region), count in self._counts.items():
            found[MachineClass(machine_type, datacenter, micro(rru), region)] += count
        return found


def _installed(record: MachineRecord | None) -> tuple[tuple[str, ...], ...]:
    return () if record is None or record.facts is None else (record.facts.profiles,)


def _is_class_unchanged(before: MachineRecord, after: MachineRecord) -> bool:
    """Return whether all fields that determine a machine's class are unchanged."""
    return (
        before.unavailability is after.unavailability
        and before.hardware is after.hardware
        and before.facts is after.facts
        and before.location is after.location
        and before.machine_type == after.machine_type
    )


def _key(record: MachineRecord) -> _Key | None:
    if record.unavailability and is_leaving(record):
        return None
    place = record.location
    return record.machine_type, place.datacenter, rru_of(record), place.region
