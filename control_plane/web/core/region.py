"""Machines of a region as a grid: data centers, their MSBs, their racks, one cell a machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.api.machines import MachineState, MachineView, UnavailabilityEvent

CELLS_MAX = 4000
"""With more machines each rack is one cell with counts, so that the page stays small."""
COLOURS = ("state", "entitlement", "profile", "load")


@dataclass(frozen=True, slots=True)
class RegionCell:
    """One machine, or one rack of many; `shade` names its colour in the style sheet."""

    name: str
    link: str
    shade: str
    title: str


@dataclass(frozen=True, slots=True)
class Msb:
    """One main switch board: its racks, each a list of cells."""

    name: str
    racks: list[tuple[str, list[RegionCell]]]
    machines: int


@dataclass(frozen=True, slots=True)
class Grid:
    """All data centers by name, and what each shade means."""

    datacenters: list[tuple[str, list[Msb]]]
    legend: list[tuple[str, str, int]]
    """(shade, meaning, machines)."""
    machines: int


def grid(machines: Iterable[MachineView], colour: str = "state") -> Grid:
    """Return the machines by place, coloured by state, entitlement, profile or load."""
    views = list(machines)
    meanings = [_meaning(view, colour) for view in views]
    counts = Counter(meanings)
    shades = _shades(counts, colour)
    tree: dict[str, dict[str, dict[str, list[tuple[MachineView, str]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for view, meaning in zip(views, meanings, strict=True):
        place = view.record.location
        tree[place.datacenter][place.msb][place.rack].append((view, meaning))
    by_rack = len(views) > CELLS_MAX
    datacenters = [
        (
            datacenter,
            [_msb(datacenter, msb, racks, shades, by_rack) for msb, racks in sorted(msbs.items())],
        )
        for datacenter, msbs in sorted(tree.items())
    ]
    legend = [(shades[meaning], meaning, count) for meaning, count in counts.most_common()]
    return Grid(datacenters, legend, len(views))


def _msb(
    datacenter: str,
    msb: str,
    racks: Mapping[str, list[tuple[MachineView, str]]],
    shades: Mapping[str, str],
    by_rack: bool,
) -> Msb:
    rows = []
    for rack, found in sorted(racks.items()):
        if by_rack:
            worst = max(found, key=lambda pair: _WORST.get(pair[1], 0))[1]
            parts = Counter(meaning for _, meaning in found)
            title = f"{rack}: " + ", ".join(f"{n} {meaning}" for meaning, n in parts.most_common())
            link = f"machines?datacenter={datacenter}&rack={rack}"
            rows.append((rack, [RegionCell(rack, link, shades[worst], title)]))
        else:
            rows.append((rack, [_cell(view, meaning, shades[meaning]) for view, meaning in found]))
    return Msb(msb, rows, sum(map(len, racks.values())))


def _cell(view: MachineView, meaning: str, shade: str) -> RegionCell:
    record = view.record
    owner = record.entitlement or "free"
    title = f"{record.machine}: {meaning}, {owner}, {len(view.tasks)} tasks"
    return RegionCell(record.machine, f"machines/{record.machine}", shade, title)


_WORST = {"down": 4, "unavailable": 3, "not ready": 2}


def open_events(view: MachineView) -> list[UnavailabilityEvent]:
    """Return what takes a machine away now or later; a record keeps what ended, too."""
    return [event for event in view.record.unavailability if event.end is None]


def state_of(view: MachineView) -> str:
    """Return one word for what can be done with a machine now."""
    if view.record.state is MachineState.DOWN:
        return "down"
    if open_events(view):
        return "unavailable"
    if not view.ready:
        return "not ready"
    return "in use" if view.tasks else "free" if not view.record.entitlement else "idle"


def _meaning(view: MachineView, colour: str) -> str:
    if colour == "entitlement":
        return view.record.entitlement or "free"
    if colour == "profile":
        return view.record.profile or "none"
    if colour == "load":
        tasks = len(view.tasks)
        return "0 tasks" if not tasks else "1–4 tasks" if tasks < 5 else "5 or more tasks"
    return state_of(view)


_STATES = {
    "down": "bad",
    "unavailable": "warn",
    "not ready": "warn2",
    "in use": "good",
    "idle": "calm",
    "free": "none",
    "0 tasks": "none",
    "1–4 tasks": "calm",
    "5 or more tasks": "good",
}
_HUES = 12


def _shades(counts: Counter[str], colour: str) -> dict[str, str]:
    if colour in ("state", "load"):
        return {meaning: _STATES[meaning] for meaning in counts}
    names = [name for name, _ in counts.most_common() if name not in ("free", "none")]
    hues = {name: f"hue{n % _HUES}" for n, name in enumerate(sorted(names))}
    return hues | {name: "none" for name in counts if name in ("free", "none")}
