"""Makes the store of this folder; runs on the sources of commit 5034db1 only (README.md).

    python make.py CHECKOUT FOLDER

The control plane of that commit runs on its durable store and on agents in memory, is brought
into the middle of many things at once, and is stopped there. What is on disk then is kept,
with what the agents had then and what the records contained.
"""

import asyncio
import lzma
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

CHECKOUT, FOLDER = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.path[:0] = [
    str(CHECKOUT),
    str(CHECKOUT / "tests"),
    str(CHECKOUT / "tests/unit/control_plane/services"),
]

import msgspec  # noqa: E402
from control_plane.services.control_plane import ControlPlane  # noqa: E402
from control_plane.services.holds import Take  # noqa: E402
from fake_agents import IMAGE_2, Region, find_image  # noqa: E402
from world import a_job  # noqa: E402

from agent.api import Limits  # noqa: E402
from control_plane.api.allocations import AllocationRecord  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.inventory import Drain, Lend  # noqa: E402
from control_plane.api.jobs import JobPhase, TaskPhase, UpdatePolicy  # noqa: E402
from control_plane.api.settings import SchedulerSettings  # noqa: E402
from control_plane.store.records import ALLOCATIONS, DECISIONS, decode  # noqa: E402
from control_plane.store.sqlite import SqliteStore  # noqa: E402
from wire.errors import Busy  # noqa: E402

MIB = 1 << 20
LARGE, HUGE = Limits(memory_max_bytes=600 * MIB), Limits(memory_max_bytes=3000 * MIB)
QUICK, SLOW = UpdatePolicy(drain_s=0.1), UpdatePolicy(drain_s=2.0)
HALF = Limits(memory_max_bytes=400 * MIB)
"""Two of them on a machine, so that one that is lost has its successor in the same MSB."""
STOPPED_AT = 1_800_000_000.0
"""The clock of the virtual loop of the tests starts here; the store is a little older."""
BEGAN = time.monotonic()
PLACES = (("dc1", "msb1"), ("dc1", "msb2"), ("dc2", "msb3"))


def clock() -> float:
    return STOPPED_AT - 600 + time.monotonic() - BEGAN


def a_region() -> Region:
    region = Region()
    for number in range(1, 19):
        region.add(f"m{number:02}", *PLACES[number % 3])
    region.add("big", "dc1", "msb1", memory_mib=4096)
    for machine in region.machines.values():
        fast = machine.behaviour
        fast.start_s = fast.stop_s = fast.switch_s = fast.pull_s = 0.05
    return region


@asynccontextmanager
async def running(region: Region, folder: Path):
    settings = SchedulerSettings(down_after_s=2.0, join_grace_s=0, poll_wait_s=1.0, resync_s=2.0)
    async with SqliteStore(folder) as store:
        cp = ControlPlane(store, region.agent, clock, settings, find_image)
        async with cp:
            yield store, cp


async def until(condition) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.02)


def stable(cp: ControlPlane, name: str) -> bool:
    return cp._scheduler.status(name).phase is JobPhase.STABLE


def phases(cp: ControlPlane, name: str) -> list[TaskPhase]:
    record = cp._jobs.find(name)
    return [] if record is None else [task.phase for task in record.tasks]


def machine_of(cp: ControlPlane, name: str, index: int = 0) -> str:
    return cp._jobs.get(name).tasks[index].placement.machine


async def set_up(region: Region, cp: ControlPlane) -> None:
    for machine in region.machines.values():
        await cp.joined(machine.join())
    for name, spec in {
        "front": EntitlementSpec(machines=4, host_profile="web"),
        "pinned": EntitlementSpec(machines=2, host_profile="cache", datacenter="dc2"),
        "base": EntitlementSpec(machines=2, host_profile="base"),
        "one": EntitlementSpec(machines=1, host_profile="base", materialization="base"),
        "batch": EntitlementSpec(machines=1, host_profile="batch"),
        "huge": EntitlementSpec(machines=1, host_profile="huge"),
        "late": EntitlementSpec(machines=1, host_profile="late"),
    }.items():
        await cp.put_entitlement(name, spec)
    for name, tasks, entitlement, limits in (
        ("huge", 1, "huge", HUGE),
        ("web", 6, "front", HALF),
        ("cache", 2, "pinned", LARGE),
        ("stacked", 1, "one", LARGE),
        ("plain", 2, "base", LARGE),
        ("crunch", 3, "batch", LARGE),
        ("old", 1, "front", Limits(memory_max_bytes=48 * MIB)),
        ("ending", 2, "front", Limits(memory_max_bytes=48 * MIB)),
    ):
        update = SLOW if name == "web" else QUICK
        spec = a_job(tasks, name=name, entitlement=entitlement, limits=limits, update=update)
        await cp.apply_job(spec)
    for name in ("huge", "web", "cache", "stacked", "plain", "old", "ending"):
        await until(lambda name=name: stable(cp, name))


async def upset(region: Region, cp: ControlPlane) -> None:
    """Do all at once that takes its time: the store is closed in the middle of it."""
    await cp.stop_job("old")
    await until(lambda: cp._jobs.find("old") is None)
    free = min(
        m.record.machine
        for m in (await cp.list_machines()).machines
        if not m.record.entitlement and m.record.machine != "big"
    )
    await cp.inventory.lend(Lend(machine=free, borrower="batch"))
    await until(lambda: phases(cp, "crunch").count(TaskPhase.RUNNING) == 2)
    maintained = machine_of(cp, "cache")
    request = Drain(machines=[maintained], reason="new fans", start_in_s=86_400, deadline_s=3600)
    await cp.inventory.drain(request)
    region.machines["big"].power_off()
    region.machines[machine_of(cp, "web")].power_off()
    await until(lambda: phases(cp, "huge") == [TaskPhase.LOST])
    await until(lambda: cp._jobs.get("web").leaving and stable(cp, "web"))

    async def refuse(transaction: str) -> None:
        raise Busy("the broker does not answer")

    cp._broker.commit = refuse
    await cp._control.apply(
        a_job(1, name="late", entitlement="late", limits=LARGE, update=QUICK), dry_run=False
    )
    await until(lambda: cp._broker.in_doubt())
    held = max(
        m.record.machine
        for m in (await cp.list_machines()).machines
        if not m.record.entitlement and not m.record.hold and m.record.machine != "big"
    )
    await cp._broker.prepare("allocator:1-999", {held: Take("front", "web")})
    for name in {machine_of(cp, "ending", index) for index in (0, 1)}:
        region.machines[name].behaviour.stop_s = 3.0
    await cp.apply_job(a_job(6, image=IMAGE_2, limits=HALF, update=SLOW))
    await until(lambda: sum(t.version == 2 for t in cp._jobs.get("web").tasks) == 2)
    await until(lambda: TaskPhase.DRAINING in phases(cp, "web"))
    await cp.stop_job("ending")
    await until(lambda: TaskPhase.STOPPING in phases(cp, "ending"))


async def content(store: SqliteStore) -> dict:
    """What is in the store, in the words of the release that wrote it."""
    from control_plane.api.capacity import EntitlementRecord
    from control_plane.api.jobs import JobRecord
    from control_plane.api.machines import MachineRecord

    found: dict = {"keys": sorted(e.key for e in (await store.list_prefix("")).entries)}
    for prefix, kind in (
        ("jobs/", JobRecord),
        ("machines/", MachineRecord),
        ("entitlements/", EntitlementRecord),
        (ALLOCATIONS, AllocationRecord),
    ):
        entries = (await store.list_prefix(prefix)).entries
        found[prefix.rstrip("/")] = {
            entry.key.rpartition("/")[2]: decode(entry.value, kind, entry.key) for entry in entries
        }
    decisions = (await store.list_prefix(DECISIONS)).entries
    found["decisions"] = [entry.key.removeprefix(DECISIONS) for entry in decisions]
    retired = (await store.list_prefix("retired/")).entries
    found["retired"] = {e.key.removeprefix("retired/"): int(e.value) for e in retired}
    return found


def agents(region: Region) -> dict:
    return {
        name: {
            "location": machine.location,
            "memory_mib": machine.memory_bytes >> 20,
            "on": machine.on,
            "boots": machine.boots,
            "epoch": machine.epoch,
            "tasks": machine.tasks,
            "specs": machine.specs,
            "last_generation": machine.last_generation,
            "images": sorted(machine.images),
            "profile": machine.profile,
            "wanted": machine.wanted,
        }
        for name, machine in region.machines.items()
    }


async def main() -> None:
    region, folder = a_region(), FOLDER / "made"
    async with running(region, folder) as (_, cp):
        await set_up(region, cp)
        await upset(region, cp)
    await until(lambda: not any(machine.jobs for machine in region.machines.values()))
    assert region.broken_rules == []
    packed = lzma.compress((folder / "twine.db").read_bytes(), preset=9)
    (FOLDER / "twine.db.xz").write_bytes(packed)
    written = msgspec.json.encode(agents(region))
    (FOLDER / "agents.json").write_bytes(msgspec.json.format(written, indent=1))
    async with SqliteStore(folder) as store:  # after the copy: opening raises the epoch
        written = msgspec.json.encode(await content(store))
    (FOLDER / "records.json").write_bytes(msgspec.json.format(written, indent=1))


asyncio.run(main())
