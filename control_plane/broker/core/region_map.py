"""Counts the machines of a region by rack and by one fact: state, owner, profile, load or power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from control_plane.api.machines import (
    MachineCell,
    MachineEvent,
    MachineRecord,
    MachineState,
    RackMap,
    RegionMap,
    UnavailabilityEvent,
)

MAP_FACTS = ("state", "entitlement", "profile", "load", "power")
CELLS_MAX = 4000
"""With more machines the map has only counts by rack, so that the answer stays below 1 MB."""
EVENTS_MAX = 50
STATES = ("in use", "idle", "free", "not ready", "unavailable", "down")
"""From the best to the worst. An idle machine is held by an entitlement and has no tasks."""
NOT_KNOWN, NO_TASKS = "not known", "no tasks"
_SHARES = ((0.25, "up to 25 %"), (0.5, "up to 50 %"), (0.75, "up to 75 %"), (9e9, "above 75 %"))
_WATTS = 100
"""Watts of one step of the map by power."""

Draw = Callable[[MachineRecord], tuple[float, float]]
"""Returns the share of its CPU that is promised to tasks (0 to 1), and its estimated draw in watts;
0 W: unknown."""
_Meaning = Callable[[MachineRecord, int, bool], str]


def open_events(record: MachineRecord) -> list[UnavailabilityEvent]:
    """Return the events of a machine that have not ended."""
    return [event for event in record.unavailability if event.end is None]


def state_of(record: MachineRecord, tasks: int, ready: bool) -> str:
    """Return the state of a machine, one of `STATES`."""
    if record.state is MachineState.DOWN:
        return "down"
    if record.unavailability and open_events(record):
        return "unavailable"
    if not ready:
        return "not ready"
    return "in use" if tasks else "idle" if record.entitlement else "free"


class RegionCount:
    """Counts one machine after the other, in any number of steps."""

    def __init__(self, by: str, machines: int, draw: Draw) -> None:
        """`by` is one of `MAP_FACTS`; `machines` is about the number that will be added."""
        self.by = by
        self._draw, self._with_cells = draw, machines <= CELLS_MAX
        self._racks: dict[tuple[str, str, str], tuple[Counter[str], list[MachineCell]]] = {}
        self._events: list[MachineEvent] = []
        self._open = 0
        facts: dict[str, _Meaning] = {
            "state": state_of,
            "entitlement": lambda record, *_: record.entitlement or "free",
            "profile": lambda record, *_: record.profile or "none",
            "load": self._load_of,
            "power": self._power_of,
        }
        self._meaning = facts[by]

    def add(self, record: MachineRecord, tasks: int, ready: bool) -> None:
        """Count one machine."""
        place = record.location
        key = (place.datacenter, place.msb, place.rack)
        rack = self._racks.get(key)
        if rack is None:
            rack = self._racks[key] = Counter(), []
        meaning = self._meaning(record, tasks, ready)
        rack[0][meaning] += 1
        if self._with_cells:
            cell = MachineCell(
                machine=record.machine,
                meaning=meaning,
                entitlement=record.entitlement,
                tasks=tasks,
            )
            rack[1].append(cell)
        if record.unavailability:
            for event in open_events(record):
                self._open += 1
                if len(self._events) < EVENTS_MAX:
                    self._events.append(MachineEvent(machine=record.machine, event=event))

    def _load_of(self, record: MachineRecord, tasks: int, _: bool) -> str:
        if not tasks:
            return NO_TASKS
        share, _watts = self._draw(record)
        return next(word for most, word in _SHARES if share <= most)

    def _power_of(self, record: MachineRecord, _: int, __: bool) -> str:
        watts = self._draw(record)[1]
        step = int(watts // _WATTS) * _WATTS
        return f"{step}–{step + _WATTS} W" if watts else NOT_KNOWN

    def answer(self) -> RegionMap:
        """Return the map of all machines that were added."""
        racks = [
            RackMap(datacenter=dc, msb=msb, rack=rack, counts=dict(counts), cells=cells)
            for (dc, msb, rack), (counts, cells) in sorted(self._racks.items())
        ]
        return RegionMap(
            by=self.by,
            machines=sum(sum(rack.counts.values()) for rack in racks),
            racks=racks,
            meanings=legend_order(self.by, counts_of(racks)),
            events=self._events,
            open_events=self._open,
        )


def counts_of(racks: list[RackMap]) -> Counter[str]:
    """Return how many machines there are of each meaning."""
    found: Counter[str] = Counter()
    for rack in racks:
        found.update(rack.counts)
    return found


def legend_order(by: str, counts: Mapping[str, int]) -> list[str]:
    """Return the meanings in the order of a legend: by rank, or the most frequent first."""
    if by == "state":
        return [state for state in STATES if state in counts]
    if by == "load":
        return [word for word in (NO_TASKS, *(word for _, word in _SHARES)) if word in counts]
    if by == "power":
        return sorted(counts, key=lambda w: int(w.partition("–")[0]) if w != NOT_KNOWN else -1)
    last = ("free", "none")
    return sorted(counts, key=lambda name: (name in last, -counts[name], name))


def merged(own: RegionMap, others: list[RegionMap]) -> RegionMap:
    """Return one map made of several maps that have no machine in common."""
    racks: dict[tuple[str, str, str], RackMap] = {}
    for rack in (rack for one in (own, *others) for rack in one.racks):
        key = (rack.datacenter, rack.msb, rack.rack)
        known = racks.get(key)
        if known is not None:
            counts = dict(Counter(known.counts) + Counter(rack.counts))
            cells = sorted([*known.cells, *rack.cells], key=lambda cell: cell.machine)
            rack = RackMap(datacenter=key[0], msb=key[1], rack=key[2], counts=counts, cells=cells)
        racks[key] = rack
    found = [rack for _, rack in sorted(racks.items())]
    return RegionMap(
        by=own.by,
        machines=sum(one.machines for one in (own, *others)),
        racks=found,
        meanings=legend_order(own.by, counts_of(found)),
        events=[event for one in (own, *others) for event in one.events][:EVENTS_MAX],
        open_events=sum(one.open_events for one in (own, *others)),
    )
