"""The map of the region, power, usage over time, differences between versions, sessions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_hostile_texts import HostileFrontEnd

from agent.api import Location
from agent.usage import TaskUsage, Usages
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.capacity_report import Amount, CapacityReport, Line, PowerBudget, Split
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import Hardware, MachineRecord, MachineState, RegionMap
from control_plane.api.routes import ROUTES
from control_plane.broker.core.region_map import CELLS_MAX, RegionCount, merged
from control_plane.identity.sessions import MAX_SESSIONS, BrowserSessions, SessionEnded
from control_plane.web.core.region import grid, power_bars, split_bar
from control_plane.web.core.usage import READINGS_MAX, Point, UsageHistory, usage_charts
from control_plane.web.core.versions import changes, choose_versions
from control_plane.web.serving import TEXT_MAX, Console
from wire.errors import Forbidden, NotFound

pytestmark = pytest.mark.behaviour("FE1")

IMAGE = "sha256:" + "0" * 64


def machine(n: int, **more: object) -> MachineRecord:
    place = Location(datacenter=f"dc{n % 2}", msb=f"msb{n % 4}", rack=f"r{n % 8}")
    return MachineRecord(machine=f"m{n}", location=place, machine_type="small", **more)


def mapped(records: list[MachineRecord], by: str = "state", tasks: int = 0) -> RegionMap:
    count = RegionCount(by, len(records), lambda record: (0.6, record.hardware.power_w))
    for record in records:
        count.add(record, tasks, True)
    return count.answer()


def cells(found: RegionMap) -> list:
    places = grid(found).datacenters
    return [cell for _, msbs in places for msb in msbs for _, row in msb.racks for cell in row]


def test_machines_are_grouped_by_place_and_the_legend_counts_them() -> None:
    found = grid(mapped([*map(machine, range(8)), machine(8, state=MachineState.DOWN)]))
    assert [name for name, _ in found.datacenters] == ["dc0", "dc1"]
    assert found.legend == [("none", "free", 8), ("bad", "down", 1)]


def test_entitlements_get_colours_of_their_own() -> None:
    records = [machine(0, entitlement="a"), machine(1, entitlement="b"), machine(2)]
    found = grid(mapped(records, "entitlement"))
    assert [(meaning, n) for _, meaning, n in found.legend] == [("a", 1), ("b", 1), ("free", 1)]
    assert len({shade for shade, _, _ in found.legend}) == 3


def test_load_and_power_are_steps_of_one_colour() -> None:
    records = [machine(n, hardware=Hardware(power_w=150 + 100 * n)) for n in range(3)]
    assert grid(mapped(records, "power")).legend == [
        ("step0", "100–200 W", 1),
        ("step2", "200–300 W", 1),
        ("step5", "300–400 W", 1),
    ]
    assert grid(mapped(records, "load", tasks=1)).legend == [("step0", "up to 75 %", 3)]
    assert grid(mapped(records, "load")).legend == [("none", "no tasks", 3)]


def test_a_large_region_has_one_cell_a_rack_that_shows_the_worst() -> None:
    records = [*map(machine, range(CELLS_MAX + 1)), machine(8, state=MachineState.DOWN)]
    found = cells(mapped(records))
    assert len(found) == 8
    assert [cell.shade for cell in found].count("bad") == 1
    assert sum("1 down" in cell.title for cell in found) == 1
    assert "datacenter=dc0&msb=msb0&rack=r0" in found[0].link


@given(st.lists(st.integers(0, 40), max_size=40, unique=True), st.integers(1, 4))
def test_maps_of_several_processes_are_one_map(numbers: list[int], parts: int) -> None:
    records = [machine(n, entitlement="e" if n % 3 else "") for n in sorted(numbers)]
    own, *others = (mapped(records[n::parts]) for n in range(parts))
    whole, joined = mapped(records), merged(own, others)
    assert joined.machines == whole.machines
    assert [(r.rack, r.counts) for r in joined.racks] == [(r.rack, r.counts) for r in whole.racks]
    assert sorted(c.machine for r in joined.racks for c in r.cells) == sorted(
        c.machine for r in whole.racks for c in r.cells
    )


def test_power_is_by_msb_with_its_limit_and_machines_are_in_one_class_each() -> None:
    msb = Line(name="dc0/msb0", all=Amount(power_w=2000), used=Amount(power_w=500))
    budget = PowerBudget(place="dc0/msb0", budget_w=900, limit_w=1000, used_w=500)
    split = Split(all=Amount(machines=4), guaranteed=Amount(machines=1), buffer=Amount(machines=3))
    report = CapacityReport(at=1.0, msbs=[msb], power=[budget], split=split)
    (bar,) = power_bars(report)
    assert (bar.all, bar.used, bar.limit) == (100, 25, 50)
    assert bar.words == "0.5 kW in use, of 2.0 kW installed, limit 1.0 kW"
    assert [(p.name, p.left, p.width) for p in split_bar(report) if p.machines] == [
        ("in use", 0, 25),
        ("free, not promised", 25, 75),
    ]


def reading(at: float, cpu_s: float, task: str = "web-0") -> Usages:
    return Usages(at_boot_s=at, tasks=[TaskUsage(task_id=task, cpu_s=cpu_s, memory_bytes=1 << 20)])


def test_usage_is_drawn_from_two_readings_on_and_not_across_a_gap_or_a_boot() -> None:
    history = UsageHistory()
    for at, cpu_s in ((10.0, 1.0), (10.0, 1.0), (20.0, 6.0), (30.0, 16.0), (500.0, 17.0)):
        history.add("m1", 1000 + at, reading(at, cpu_s))
    history.add("m1", 1505.0, reading(3.0, 0.1))
    points = history.points("m1", "web-0")
    assert [point.cores for point in points] == [0.5, 1.0]
    assert history.points("m1", "other-0") == history.points("m2") == []
    cpu, memory, *_ = usage_charts(points, lambda value: f"{value:.0f} B")
    assert (cpu.now, memory.now) == ("1.00 cores", "1048576 B")
    assert usage_charts(points[:1], str) == []


@pytest.mark.behaviour("BUG-UX152")
def test_a_page_has_all_points_of_a_chart() -> None:
    """Regression: points were cut as texts of users are, and the browser drew none of them."""
    points = [Point(5.0 * n, n % 3, 1 << 20, 1.0, 1.0) for n in range(READINGS_MAX)]
    charts = usage_charts(points, str)
    console = Console(HostileFrontEnd(), ROUTES, lambda: 1)
    page = console._templates.from_string(
        '{% from "macros.html" import lines %}{{ lines(charts) }}'
    )
    text = page.render(charts=charts)
    assert len(charts[0].line) > TEXT_MAX
    assert f'<polyline points="{charts[0].line}"/>' in text
    assert f'<polygon points="{charts[0].area}"/>' in text


def test_the_number_of_readings_of_a_machine_is_bounded() -> None:
    history = UsageHistory()
    for n in range(READINGS_MAX + 9):
        history.add("m1", float(n), reading(float(n), float(n)))
    assert len(history.points("m1")) == READINGS_MAX - 1


def test_differences_between_versions_are_shown_without_secrets() -> None:
    base = {"name": "web", "entitlement": "e", "tasks": 1, "image": IMAGE}
    old = JobSpec(**base, command=["/a"])
    new = JobSpec(**base, command=["/b", "1"], environment={"KEY": "hidden"})
    found = {change.field: (change.before, change.after) for change in changes(old, new)}
    assert found == {
        "command": ('["/a"]', '["/b","1"]'),
        "environment.KEY": ("", "(not shown)"),
    }
    assert changes(old, old) == []


@pytest.mark.behaviour("BUG-UX85")
def test_an_empty_text_of_a_new_entitlement_is_no_change() -> None:
    """Formerly requests showed "business_unit – → –"."""
    spec = EntitlementSpec(machines=2, host_profile="web")
    assert [change.field for change in changes(None, spec) if not change.after] == []
    sold = replace(spec, business_unit="ads")
    assert [(c.before, c.after) for c in changes(sold, spec)] == [("ads", "")]


def test_the_newest_two_versions_are_compared_unless_others_are_requested() -> None:
    known = dict.fromkeys((1, 3, 4))
    assert choose_versions(known, 0, 0) == (3, 4)
    assert choose_versions(known, 1, 3) == (1, 3)
    assert choose_versions({2: None}, 0, 9) == (0, 2)


ONE, TWO = "0" * 12, "1" * 12


def test_sessions_are_listed_for_their_caller_and_for_operators() -> None:
    now = [100.0]
    sessions = BrowserSessions(lambda: now[0])
    sessions.record_request(ONE, "ann", "/ui/", browser="x" * 999)
    sessions.record_request(TWO, "bob", "/ui/jobs")
    now[0] = 160.0
    sessions.record_request(ONE, "ann")
    (mine,) = sessions.list_sessions("ann", everyone=False).sessions
    assert (mine.opened_at, mine.seen_at, mine.page, len(mine.browser)) == (100, 160, "/ui/", 200)
    assert [s.who for s in sessions.list_sessions("ann", everyone=True).sessions] == ["ann", "bob"]
    now[0] += 3590.0
    assert [s.who for s in sessions.list_sessions("ann", everyone=True).sessions] == ["ann"]


def test_a_session_is_ended_by_its_caller_or_an_operator_and_is_refused_then() -> None:
    sessions = BrowserSessions()
    sessions.record_request(ONE, "ann")
    with pytest.raises(NotFound):
        sessions.end(ONE, "bob", may_end_all=False)
    with pytest.raises(Forbidden, match="opened by ann"):
        sessions.record_request(ONE, "bob")
    sessions.end(ONE, "root", may_end_all=True)
    with pytest.raises(SessionEnded, match="ended by root"):
        sessions.record_request(ONE, "ann")
    with pytest.raises(Forbidden, match="malformed"):
        sessions.record_request("../x", "ann")


def test_the_number_of_sessions_is_bounded() -> None:
    sessions = BrowserSessions()
    for n in range(MAX_SESSIONS + 5):
        sessions.record_request(f"{n:012x}", "ann")
    assert len(sessions.list_sessions("ann", everyone=False).sessions) == MAX_SESSIONS
