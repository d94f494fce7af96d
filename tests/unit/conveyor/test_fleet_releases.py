"""A release of Twine's own packages goes to hosts by a pipeline, canary first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from control_plane.runtime.runtime import Runtime
from conveyor.api import ControlRequest, ControlVerb, PipelineSpec, StartRequest
from conveyor.config import FleetSettings
from conveyor.core.fleet import FleetRecord, FleetTimeouts, ObservedHost, advance, fleet_progress
from conveyor.fleets import FleetReleases
from conveyor.pipeline_file import pipeline_spec
from conveyor.records import DeliveryRecords, decoded
from conveyor.runs import JobProgress, PipelineRun
from conveyor.service import DeliveryService
from tests.unit.conveyor.delivery_model import KillableStore, Killed, ModelPlane, ScriptedMeter
from wire.errors import Busy, ConfigError, HostError, InvalidInput

pytestmark = pytest.mark.behaviour("CV3", "AV15")

OLD, NEW, BROKEN, SICK = "0.1.0", "0.2.0", "0.3.0", "0.4.0"
HOSTS = ["m1", "m2", "m3", "m4"]


class ModelHosts:
    """Implements `FleetHosts`. BROKEN does not start; SICK starts but never answers."""

    def __init__(self, plane: ModelPlane) -> None:
        self.plane = plane
        self.runs = {"agents": dict.fromkeys(HOSTS, OLD), "plane": {"cp": OLD}}
        self.away: set[str] = set()
        self.installs: list[tuple[str, str]] = []
        self.unhealthy_at_once = 0

    def is_healthy(self, host: str, release: str) -> bool:
        return release not in (BROKEN, SICK) and host not in self.away

    async def observe(self, fleet: FleetSettings) -> list[ObservedHost]:
        self.plane.point()
        runs = self.runs["plane" if fleet.hosts else "agents"]
        bad = [h for h, r in runs.items() if not self.is_healthy(h, r) and h not in self.away]
        self.unhealthy_at_once = max(self.unhealthy_at_once, len(bad))
        # A silent host shows the release of its last report.
        return [
            ObservedHost(h, r if self.is_healthy(h, r) else OLD, self.is_healthy(h, r), "silent")
            for h, r in runs.items()
        ]

    async def install(self, fleet: FleetSettings, host: str, release: str) -> None:
        self.plane.point()
        self.runs["plane" if fleet.hosts else "agents"][host] = release
        self.installs.append((host, release))
        self.plane.point()
        if release == BROKEN:
            raise HostError("install ended with 1: the agent does not start")


def a_release(**changes: Any) -> PipelineSpec:
    document: dict[str, Any] = {
        "name": "twine",
        "fleets": ["agents", "plane"],
        "stages": [
            {"kind": "canary", "tasks": 1, "soak_s": "60s", "gates": ["health"]},
            {"kind": "percent", "percent": 50, "soak_s": "30s", "gates": ["health"]},
            {"kind": "all", "gates": ["health"]},
        ],
        "gates": {"health": {"health": {}}},
        **changes,
    }
    return pipeline_spec(document, "the test's pipeline")


class FleetWorld:
    """The service with fleets of modelled hosts, on a clock that the test steps."""

    def __init__(self, spec: PipelineSpec | None = None) -> None:
        self.now, self.spec = 1_800_000_000.0, spec or a_release()
        self.plane, self.store = ModelPlane(), KillableStore()
        self.hosts = ModelHosts(self.plane)
        self.settings = {
            "agents": FleetSettings(install=["x"], healthy_s=120.0, settle_s=10.0),
            "plane": FleetSettings(install=["x"], hosts=["cp"], probe=["x"], healthy_s=120.0),
        }
        self.service: DeliveryService
        self.fleets: FleetReleases

    async def begin(self) -> FleetWorld:
        await self.store.__aenter__()
        self.restart()
        await self.service.apply(self.spec, "user:ann")
        return self

    def restart(self) -> None:
        runtime = Runtime()
        runtime.date = lambda: self.now  # type: ignore[method-assign]
        self.fleets = FleetReleases(
            self.store, self.plane, self.hosts, self.settings, runtime, round_s=2.0
        )
        meter: Any = ScriptedMeter(self.plane)
        records = DeliveryRecords(self.store)
        self.service = DeliveryService(records, self.fleets, runtime, meter)

    async def start(self, release: str) -> None:
        await self.service.start("twine", StartRequest(image=release), "user:ann")

    async def round(self) -> None:
        self.now += 5.0
        for name in self.settings:
            await self.fleets.round(name)
        await self.service.round("twine")

    async def until(self, state: str) -> PipelineRun:
        for _ in range(600):
            await self.round()
            view = await self.service.view("twine")
            if view.record.active is None and view.last is not None:
                assert view.last.state == state, view.last
                return view.last
        raise AssertionError(f"no end: {view.record.active}")

    def agents(self) -> list[str]:
        return list(self.hosts.runs["agents"].values())


async def test_cv3_av15_agents_first_then_the_control_plane_each_canary_first():
    world = await FleetWorld().begin()
    await world.start(NEW)
    run = await world.until("done")
    assert world.hosts.installs == [*((h, NEW) for h in HOSTS), ("cp", NEW)]
    assert [s.name for s in run.steps[:4]] == [
        *("fleet/agents: canary 1", "fleet/agents: 50 %", "fleet/agents: all"),
        "fleet/plane: canary 1",
    ]
    canary = run.steps[0]
    assert canary.reached is not None
    assert canary.ended is not None
    assert canary.ended - canary.reached >= 60
    assert world.hosts.unhealthy_at_once == 0
    assert run.back == {"fleet/agents": OLD, "fleet/plane": OLD}


@pytest.mark.parametrize("release", [BROKEN, SICK])
async def test_cv3_a_release_that_does_not_start_is_stopped_at_the_canary_and_taken_back(release):
    """The rollback is the same after a failed installation and after an agent that never answers
    again."""
    world = await FleetWorld().begin()
    await world.start(NEW)
    await world.until("done")
    world.hosts.installs.clear()
    await world.start(release)
    run = await world.until("rolled-back")
    assert world.hosts.installs == [("m1", release), ("m1", NEW)]
    assert world.agents() == [NEW] * 4
    assert world.hosts.runs["plane"] == {"cp": NEW}
    assert "host m1: " in run.reason
    assert [s.name for s in run.steps] == ["fleet/agents: canary 1", "rollback"]
    assert world.hosts.unhealthy_at_once <= 1
    await world.start(NEW)  # the fleet is as it was before the failed release


async def test_agents_are_rolled_back_too_if_the_control_plane_fails():
    world = await FleetWorld().begin()
    install = world.hosts.install

    async def fails_on_cp(fleet: FleetSettings, host: str, release: str) -> None:
        await install(fleet, host, release)
        if (host, release) == ("cp", NEW):
            raise HostError("install ended with 1: a table is unknown")

    world.hosts.install = fails_on_cp  # type: ignore[method-assign]
    await world.start(NEW)
    run = await world.until("rolled-back")
    assert "fleet plane: host cp: install ended with 1: a table is unknown" in run.reason
    assert world.agents() == [OLD] * 4
    assert world.hosts.runs["plane"] == {"cp": OLD}


async def test_an_unreachable_host_is_skipped_and_counted():
    spec = a_release(fleets=["agents"])
    world = await FleetWorld(spec).begin()
    world.settings["agents"] = FleetSettings(install=["x"], healthy_s=120.0, max_unavailable=1)
    world.hosts.away = {"m3"}
    await world.start(NEW)
    await world.until("done")
    assert world.agents() == [NEW, NEW, OLD, NEW]
    world.hosts.away = set()
    for _ in range(5):
        await world.round()
    assert world.agents() == [NEW] * 4, "it is brought to the release when it is back"


async def test_abort_changes_no_host_and_the_next_run_continues():
    world = await FleetWorld(a_release(fleets=["agents"])).begin()
    await world.start(NEW)
    while world.agents().count(NEW) < 2:
        await world.round()
    request = ControlRequest(verb=ControlVerb.ABORT, reason="lunch")
    await world.service.control("twine", request, "user:ann")
    await world.until("aborted")
    assert world.agents().count(NEW) == 2
    await world.start(NEW)
    await world.until("done")
    assert world.agents() == [NEW] * 4


async def test_the_command_of_one_host_ends_before_that_of_the_next_begins():
    world = await FleetWorld(a_release(fleets=["agents"])).begin()
    await world.start(NEW)
    gate, begun = asyncio.Event(), asyncio.Event()
    install = world.hosts.install

    async def slow(fleet: FleetSettings, host: str, release: str) -> None:
        begun.set()
        await gate.wait()
        await install(fleet, host, release)

    world.hosts.install = slow  # type: ignore[method-assign]
    await world.service.round("twine")
    await world.service.round("twine")
    under_way = asyncio.create_task(world.fleets.round("agents"))
    await begun.wait()
    seen = await world.fleets.read_progress("fleet/agents", NEW)
    assert (seen.new, seen.new_healthy, seen.updating, seen.settled) == (1, 0, True, False)
    gate.set()
    await under_way
    assert world.hosts.installs == [("m1", NEW)]
    await world.fleets.round("agents")
    assert world.hosts.installs == [("m1", NEW)], "it has to stay healthy first"


async def test_a_kill_at_any_await_does_not_change_the_final_state():
    """Each host is changed once, or twice by the same request, and never two hosts at a time."""
    for release, state, expected in ((NEW, "done", [NEW] * 4), (BROKEN, "rolled-back", [OLD] * 4)):
        point, was_killed = 0, True
        while was_killed:
            world = await FleetWorld(a_release(fleets=["agents"])).begin()
            world.store.plane = world.plane
            await world.start(release)
            world.plane.kill_in, was_killed = point, False
            for _ in range(600):
                try:
                    await world.round()
                except Killed:
                    was_killed = True
                    world.restart()
                    await world.service.load()
                last = (await world.service.view("twine")).last
                if last is not None:
                    break
            assert last is not None, point
            assert last.state == state, (point, last)
            assert world.agents() == expected, point
            assert world.hosts.unhealthy_at_once <= 1
            assert len(world.hosts.installs) <= (5 if release == NEW else 3), point
            point += 5
        assert point > 50


async def test_a_process_that_lost_its_store_touches_no_host_and_ends(monkeypatch):
    """Another instance has the lease and continues with the hosts."""
    world = await FleetWorld(a_release(fleets=["agents"])).begin()
    await world.start(NEW)
    await world.service.round("twine")
    await world.service.round("twine")
    monkeypatch.setattr(world.store, "failure", lambda: "another instance has the lease")
    with pytest.raises(Busy, match="another instance has the lease"):
        await world.fleets.run()
    assert world.hosts.installs == []


async def test_invalid_settings_of_a_fleet_are_refused_at_once():
    gates = {"health": {"command": {"run": "x"}}}
    with pytest.raises(InvalidInput) as refused:
        a_release(jobs=["web"], trigger={"image": "x:y"}, gates=gates)
    fields = {error.field for error in refused.value.errors}
    assert {"jobs", "trigger.image", "gates.health.command"} <= fields
    world = await FleetWorld().begin()
    with pytest.raises(InvalidInput, match="takes releases"):
        await world.start(f"sha256:{0:064x}")
    assert await world.fleets.read_progress("fleet/none", NEW) == JobProgress(job="fleet/none")


@pytest.mark.behaviour("BUG-CP100")
async def test_a_release_to_ten_thousand_hosts_is_stored_on_every_engine():
    """On etcd the record of the fleet grew too large, which ended the service for good."""
    names = [f"dc1-msb2-row3-rack{n // 40:03d}-host{n:05d}.example.org" for n in range(10_000)]
    world = FleetWorld()
    world.store = KillableStore(strict=True)
    world.hosts.runs["agents"] = dict.fromkeys(names, NEW)
    await world.begin()
    put = dict.fromkeys(names[:-1], NEW)
    large = FleetRecord(release=NEW, stable=OLD, put=put, version=1)
    await world.fleets._change("agents", lambda _: large)
    world.hosts.runs["agents"][names[-1]] = OLD
    await world.fleets.round("agents")
    assert world.hosts.installs == [(names[-1], NEW)]
    stored, _ = await world.fleets._read("agents")
    assert len(stored.put) == 10_000


@pytest.mark.behaviour("BUG-CP100")
@pytest.mark.parametrize("data", [b"zz", b"{", b'{"release": "\xff"}'])
def test_a_damaged_record_is_named(data: bytes):
    with pytest.raises(ConfigError, match=r"cannot read fleets/agents: .* is damaged"):
        decoded(data, FleetRecord, "fleets/agents")


@pytest.mark.behaviour("BUG-CP163")
def test_the_record_of_a_fleet_forgets_hosts_that_left_the_region():
    """Formerly it grew with each host that ever had a release."""
    hosts = [ObservedHost(name, OLD, True) for name in HOSTS]
    record = FleetRecord(release=NEW, stable=OLD, version=1, put={"gone": NEW, "m1": NEW})
    after = advance(record, hosts, FleetTimeouts(1.0, 1.0), 0.0)
    assert after.put == {"m1": NEW}
    after = advance(replace(after, work=None), hosts[1:], FleetTimeouts(1.0, 1.0), 0.0)
    assert after.put == {"m2": NEW}


class Compared(str):
    """A name that counts its comparisons with other names."""

    __slots__ = ()
    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


@pytest.mark.behaviour("BUG-CP101")
def test_the_hosts_of_a_large_fleet_are_not_compared_with_each_other():
    """With 10,000 hosts this stopped the service for 9 s in each round."""
    names = [Compared(f"host{number:04d}") for number in range(400)]
    hosts = [ObservedHost(n, NEW if i < 200 else OLD, True) for i, n in enumerate(names)]
    record = FleetRecord(release=NEW, stable=OLD, version=1, put=dict.fromkeys(names[:200], NEW))
    Compared.count = 0
    progress = fleet_progress("fleet/agents", record, hosts, NEW, 0)
    after = advance(record, hosts, FleetTimeouts(1.0, 1.0), 0.0)
    assert (progress.new_tasks, progress.stable_tasks) == (tuple(names[:200]), tuple(names[200:]))
    assert after.work is not None
    assert after.work.host == names[200]
    assert Compared.count < 10 * len(names)
