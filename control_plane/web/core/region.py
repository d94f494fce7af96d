"""The map of a region as a grid: data centers, their MSBs, their racks, one cell a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from control_plane.api.capacity_report import CapacityReport
from control_plane.api.machines import MachineCell, RackMap, RegionMap
from control_plane.broker.core.region_map import NO_TASKS, NOT_KNOWN, STATES, counts_of


@dataclass(frozen=True, slots=True)
class RegionCell:
    """One machine, or one rack in a large region; `shade` names its colour in the style sheet."""

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
    by_rack: bool
    """Whether a cell is a rack instead of one machine."""


def grid(region_map: RegionMap) -> Grid:
    """Return the machines by place, coloured by the fact that the map is about."""
    counts, shades = counts_of(region_map.racks), shades_of(region_map)
    tree: dict[str, dict[str, list[RackMap]]] = defaultdict(lambda: defaultdict(list))
    for rack in region_map.racks:
        tree[rack.datacenter][rack.msb].append(rack)
    rank = {meaning: number for number, meaning in enumerate(region_map.meanings)}
    datacenters = [
        (name, [_msb(msb, racks, shades, rank, region_map.by) for msb, racks in msbs.items()])
        for name, msbs in tree.items()
    ]
    legend = [(shades[meaning], meaning, counts[meaning]) for meaning in region_map.meanings]
    by_rack = any(rack.counts and not rack.cells for rack in region_map.racks)
    return Grid(datacenters, legend, region_map.machines, by_rack)


def _msb(
    name: str,
    racks: Sequence[RackMap],
    shades: Mapping[str, str],
    rank: Mapping[str, int],
    by: str,
) -> Msb:
    rows = []
    for rack in racks:
        if rack.cells:
            cells = [_cell(cell, shades[cell.meaning]) for cell in rack.cells]
        else:
            meaning = _rack_meaning(rack.counts, rank, by)
            parts = sorted(rack.counts.items(), key=lambda part: -part[1])
            title = f"{rack.rack}: " + ", ".join(f"{n} {word}" for word, n in parts)
            place = f"datacenter={quote(rack.datacenter)}&msb={quote(name)}"
            link = f"machines?{place}&rack={quote(rack.rack)}"
            cells = [RegionCell(rack.rack, link, shades[meaning], title)]
        rows.append((rack.rack, cells))
    return Msb(name, rows, sum(sum(rack.counts.values()) for rack in racks))


def _rack_meaning(counts: Mapping[str, int], rank: Mapping[str, int], by: str) -> str:
    """Return the value that colours a rack: its worst state, median step or most common value."""
    if by == "state":
        return max(counts, key=lambda meaning: rank[meaning])
    if by in ("load", "power"):
        half, seen = sum(counts.values()) / 2, 0
        for meaning in sorted(counts, key=lambda one: rank[one]):
            seen += counts[meaning]
            if seen >= half:
                return meaning
    return max(counts, key=lambda meaning: (counts[meaning], meaning))


def _cell(cell: MachineCell, shade: str) -> RegionCell:
    tasks = f"{cell.tasks} task{'' if cell.tasks == 1 else 's'}"
    title = f"{cell.machine}: {cell.meaning}, {cell.entitlement or 'free pool'}, {tasks}"
    return RegionCell(cell.machine, f"machines/{quote(cell.machine)}", shade, title)


_STATES = dict(zip(STATES, ("good", "calm", "none", "warn2", "warn", "bad"), strict=True))
_HUES, _STEPS = 12, 6
_BLANK = ("free", "none", NO_TASKS, NOT_KNOWN)


def shades_of(region_map: RegionMap) -> dict[str, str]:
    """Return the shade of each meaning: fixed for states, darker by step, a hue for each name."""
    if region_map.by == "state":
        return {meaning: _STATES[meaning] for meaning in region_map.meanings}
    named = [meaning for meaning in region_map.meanings if meaning not in _BLANK]
    if region_map.by in ("load", "power"):
        last = max(1, len(named) - 1)
        shades = {m: f"step{round(n * (_STEPS - 1) / last)}" for n, m in enumerate(named)}
    else:
        shades = {name: f"hue{n % _HUES}" for n, name in enumerate(sorted(named))}
    return shades | {m: "none" for m in region_map.meanings if m in _BLANK}


@dataclass(frozen=True, slots=True)
class PowerBar:
    """Power of one MSB or place with a budget; widths in percent of the largest."""

    place: str
    used: float
    """Nominal draw of machines with tasks."""
    all: float
    """Nominal draw of every machine; 0: unknown."""
    limit: float | None
    """None: the place has no budget."""
    words: str


def power_bars(report: CapacityReport) -> list[PowerBar]:
    """Return power by MSB, and of other places that have a budget."""
    budgets = {budget.place: budget for budget in report.power}
    rows = {
        line.name: (line.used.power_w, line.all.power_w)
        for line in report.msbs
        if line.all.power_w or line.name in budgets
    }
    for place, budget in budgets.items():
        rows[place] = (budget.used_w, rows.get(place, (0, 0))[1])
    limits = {place: budget.limit_w for place, budget in budgets.items()}
    top = max((max(*watts, limits.get(place, 0)) for place, watts in rows.items()), default=0)
    scale = 100 / max(1, top)
    return [
        PowerBar(
            place,
            used * scale,
            whole * scale,
            limits[place] * scale if place in limits else None,
            _power_text(used, whole, limits.get(place)),
        )
        for place, (used, whole) in sorted(rows.items())
    ]


def _power_text(used: int, whole: int, limit: int | None) -> str:
    parts = [f"{used / 1000:.1f} kW in use"]
    parts += [f"of {whole / 1000:.1f} kW installed"] if whole else []
    parts += [f"limit {limit / 1000:.1f} kW"] if limit is not None else []
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One class of machines in a bar of them all, in percent."""

    name: str
    shade: str
    machines: int
    left: float
    width: float


def split_bar(report: CapacityReport) -> list[SplitPart]:
    """Return every machine in one class: used, lent, idle, promised, free or unusable."""
    split = report.split
    classes = (
        ("in use", "good", split.guaranteed),
        ("lent", "hue3", split.lent),
        ("held and idle", "calm", split.idle),
        ("free, promised to quotas", "step1", split.unused_quota),
        ("free, not promised", "none", split.buffer),
        ("unusable", "warn", split.unusable),
    )
    whole, left, parts = max(1, split.all.machines), 0.0, []
    for name, shade, amount in classes:
        width = 100 * amount.machines / whole
        parts.append(SplitPart(name, shade, amount.machines, left, width))
        left += width
    return parts
