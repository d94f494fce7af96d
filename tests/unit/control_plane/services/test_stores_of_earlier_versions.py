"""This version opens a store that an earlier version wrote, and every task stays unchanged."""

import asyncio
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_agents import IMAGE_2, Region
from virtual_time import run
from world import World, a_job

from agent import api
from agent.api import Health, Limits, TaskState
from control_plane.api.jobs import UpdatePolicy
from control_plane.store import Operation, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore

STORES = Path(__file__).resolve().parents[3] / "data/stores"
VERSIONS = sorted(path.name for path in STORES.iterdir() if path.is_dir())
MIB = 1 << 20


class _Agent(msgspec.Struct):
    location: api.Location
    memory_mib: int
    on: bool
    boots: int
    epoch: int
    tasks: dict[str, api.TaskStatus]
    specs: dict[str, api.TaskSpec]
    last_generation: dict[str, int]
    images: list[str]
    profile: api.ProfileStatus
    wanted: api.ProfileSpec


class Killed(BaseException):
    """The process ended here."""


class MortalStore(MemoryStore):
    """A copy of a store in memory; each process on it may die after some transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.deaths = 0

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation], **more: Any):
        if self.left is not None:
            if self.left <= 0:
                self.left = 0
                self.deaths += 1
                raise Killed
            self.left -= 1
        return await super().txn(compare, operations, **more)


def the_region(version: str) -> Region:
    """Return the machines of that version, with agents that continue from their recorded state."""
    agents = msgspec.json.decode(
        (STORES / version / "agents.json").read_bytes(), type=dict[str, _Agent]
    )
    region = Region()
    for name, was in agents.items():
        assert was.location.datacenter
        machine = region.add(name, was.location.datacenter, was.location.msb, was.memory_mib)
        machine.on = machine.reachable = was.on
        machine.boots, machine.epoch = was.boots, was.epoch
        machine.tasks, machine.specs = dict(was.tasks), dict(was.specs)
        machine.last_generation, machine.images = dict(was.last_generation), set(was.images)
        machine.profile, machine.wanted = was.profile, was.wanted
    return region


async def entries_of(version: str, folder: Path) -> tuple[int, dict[str, bytes]]:
    """Return the epoch of a copy of the store, and the entries that the current engine reads."""
    folder.mkdir()
    packed = (STORES / version / "twine.db.xz").read_bytes()
    (folder / "twine.db").write_bytes(lzma.decompress(packed))
    async with SqliteStore(folder) as store:
        listing = await store.list_prefix("")
        return store.epoch(), {entry.key: entry.value for entry in listing.entries}


async def as_memory(epoch: int, entries: dict[str, bytes]) -> MortalStore:
    """Return the same store on virtual time, because threads cannot follow a clock that jumps."""
    store = MortalStore()
    for _ in range(epoch):
        async with store:
            pass
    async with store:
        for key, value in entries.items():
            await store.txn({}, [Put(key, value)])
    return store


def placed(records: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Return task → machine, generation and version, as the earlier version recorded them."""
    return {
        f"{job}-{task['index']}": (
            task["placement"]["machine"],
            task["generation"],
            task["version"],
        )
        for job, record in records["jobs"].items()
        for task in record["tasks"]
        if task["placement"] and not record["stopping"]
    }


def running(region: Region) -> dict[str, tuple[str, int, str]]:
    """Return task → machine, generation and invocation of running tasks."""
    return {
        task: (machine.name, status.generation, status.invocation_id)
        for machine in region.machines.values()
        for task, status in machine.tasks.items()
        if status.state is TaskState.RUNNING and status.health is Health.HEALTHY
    }


def versions(region: Region) -> set[str]:
    """Return the images of running tasks of `web`."""
    where = ((region.machines[found[0]], task) for task, found in running(region).items())
    return {machine.specs[task].image for machine, task in where if task.startswith("web-")}


async def settled(world: World) -> None:
    """Wait until all operations have ended."""
    region = world.region
    await world.until(lambda: "late-0" in running(region), within_s=600)
    await world.until(lambda: not any(t.startswith("ending") for t in running(region)))
    await world.until(lambda: versions(region) <= {IMAGE_2}, within_s=600)
    await world.stable("web", within_s=600)
    await asyncio.sleep(120)


def check_tasks(records: dict[str, Any], region: Region, before: dict[str, tuple]) -> None:
    """Assert that no task was lost or moved, and that only old tasks of `web` restarted."""
    now, was = running(region), placed(records)
    started = [task for m in region.machines.values() for task in m.starts]
    outdated = {t for t, (_, _, version) in was.items() if t[:4] == "web-" and version == 1}
    assert sorted(started) == sorted({*outdated, "late-0"})
    assert now.keys() == {*was, "late-0"} - {"huge-0"}
    for task, found in now.items():
        if task == "late-0":
            continue
        assert found[0] == was[task][0], f"{task} was moved to {found[0]}"
        if task not in outdated:
            assert found == before[task], f"{task} was started again"
            assert found[1] == was[task][1]


async def check_the_rest(records: dict[str, Any], world: World) -> None:
    """Assert that loans and plans are unchanged, and exactly the decided changes carried out."""
    used = {machine for machine, _, _ in placed(records).values()}
    views = {v.record.machine: v.record for v in (await world.cp.list_machines()).machines}
    for name, was in records["machines"].items():
        found = views[name]
        assert found.hold is None
        assert (found.loan.since if found.loan else None) == (was.get("loan") or {}).get("since")
        planned = [e["event_id"] for e in was.get("unavailability", ()) if not e.get("end")]
        assert [e.event_id for e in found.unavailability if e.end is None] == planned
        hold = was.get("hold")
        if hold and hold["transaction"] in records["decisions"]:
            assert found.entitlement == hold["entitlement"]
        elif name in used:
            assert found.entitlement == was["entitlement"]
        else:
            assert found.entitlement == ""


async def check_what_comes_back(world: World) -> None:
    """Assert that lost machines return, and stopped jobs restart above the used generations."""
    region = world.region
    for name in ("m02", "big"):
        region.machines[name].power_on()
    await world.until(lambda: not region.machines["m02"].tasks, within_s=600)
    await world.until(lambda: "huge-0" in running(region), within_s=600)
    assert running(region)["huge-0"][0] == "big"
    for name, used in (("old", 3), ("ending", 7)):
        await world.cp.apply_job(
            a_job(
                1,
                name=name,
                limits=Limits(memory_max_bytes=48 * MIB),
                update=UpdatePolicy(drain_s=0.1),
            )
        )
        await world.until(lambda name=name: f"{name}-0" in running(region), within_s=600)
        assert running(region)[f"{name}-0"][1] > used


@pytest.mark.parametrize("version", VERSIONS)
def test_no_task_is_lost_restarted_or_moved_by_an_upgrade(version: str, tmp_path: Path) -> None:
    epoch, entries = asyncio.run(entries_of(version, tmp_path / "copy"))
    records = msgspec.json.decode((STORES / version / "records.json").read_bytes())
    assert sorted(entries) == records["keys"]

    async def main() -> None:
        region = the_region(version)
        before = running(region)
        world = World(region, await as_memory(epoch, entries))
        async with asyncio.timeout(20_000), world.running():
            await settled(world)
            check_tasks(records, region, before)
            await check_the_rest(records, world)
            await check_what_comes_back(world)
        assert region.broken_rules == []

    run(main())


async def dies(world: World, store: MortalStore) -> None:
    """Run a process until its store ends it, or until nothing is left to write."""
    deaths = store.deaths
    try:
        async with world.running():
            await world.until(lambda: store.deaths > deaths, within_s=600)
    except (Killed, BaseExceptionGroup):
        assert store.deaths > deaths
    except TimeoutError:
        assert store.deaths == deaths


@pytest.mark.behaviour("F-61")
@pytest.mark.parametrize("version", VERSIONS)
def test_an_upgrade_that_is_killed_again_and_again_ends_the_same(
    version: str, tmp_path: Path
) -> None:
    """Each process dies one transaction later than the process before."""
    epoch, entries = asyncio.run(entries_of(version, tmp_path / "copy"))
    records = msgspec.json.decode((STORES / version / "records.json").read_bytes())

    async def main() -> None:
        region = the_region(version)
        before = running(region)
        store = await as_memory(epoch, entries)
        for steps in range(12):
            store.left = steps
            await dies(World(region, store), store)
        assert store.deaths >= 6
        store.left = None
        world = World(region, store)
        async with asyncio.timeout(20_000), world.running():
            await settled(world)
            check_tasks(records, region, before)
            await check_the_rest(records, world)
        assert region.broken_rules == []

    run(main())
