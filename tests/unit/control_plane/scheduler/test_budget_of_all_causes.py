"""All causes that remove tasks, each with a named operation: one budget applies to all of them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from virtual_time import run
from world import World, a_job, a_region

from agent.api import Health, ProfileState
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.machines import EventKind
from control_plane.api.maintenance import MaintenanceRequest, Work
from control_plane.api.profiles import ProfileProposal, version_name
from control_plane.api.updates import Canary, UpdatePolicy

OTHER = ["/bin/other"]
PROFILE = 'description = "x"\nextends = "web"\n[sysctl]\n"net.core.somaxconn" = 1\n'
TASKS = 6
QUICK = UpdatePolicy(drain_s=0.0, max_unavailable=2)


def first(w: World) -> str:
    placement = w.cp._jobs.get("web").tasks[0].placement
    assert placement is not None
    return placement.machine


async def release(w: World) -> None:
    await w.cp.apply_job(a_job(TASKS, update=QUICK, command=OTHER))


async def canary(w: World) -> None:
    update = UpdatePolicy(drain_s=0.0, max_unavailable=2, canary=Canary(tasks=3, hold_s=5))
    await w.cp.apply_job(a_job(TASKS, update=update, command=OTHER))


async def rollback(w: World) -> None:
    await release(w)
    await w.stable()
    await w.cp.rollback_job("web")


async def maintenance(w: World) -> None:
    await w.cp.inventory.outages.plan_unavailability([first(w)], EventKind.MAINTENANCE, "a fan")


async def kernel(w: World) -> None:
    request = MaintenanceRequest(
        machines=[first(w)], work=Work.KERNEL, reason="6.12.9", despite=True
    )
    await w.cp.maintenance.accept("k1", request, "root")


async def transfer(w: World) -> None:
    for number in (5, 6, 7):
        w.region.add(f"m{number}", "dc1", "msb1")
        await w.cp.joined(w.region.machines[f"m{number}"].join())
    await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.move_job("web", "back")


async def power(w: World) -> None:
    await w.cp.inventory.outages.plan_unavailability([first(w)], EventKind.POWER_CAP, "too hot")


async def refresh(w: World) -> None:
    await w.cp.inventory.outages.plan_unavailability([first(w)], EventKind.REFRESH, "newer ones")


async def profile(w: World) -> None:
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[version_name("web", PROFILE)] = ProfileState.PENDING_REBOOT
    await w.cp.profiles.propose("front", ProfileProposal(text=PROFILE, reason="x", gate_s=1), "eve")


async def owner(w: World) -> None:
    for index in range(4):
        await w.cp.move_task("web", index, "", "elsewhere")


CAUSES: dict[str, tuple[Callable[[World], Awaitable[None]], str]] = {
    "release": (release, "update"),
    "canary": (canary, "update"),
    "rollback": (rollback, "update"),
    "transfer": (transfer, "update"),
    "maintenance": (maintenance, "move"),
    "maintenance (kernel upgrade)": (kernel, "move"),
    "maintenance (refresh)": (refresh, "move"),
    "power": (power, "move"),
    "profile": (profile, "move"),
    "owner": (owner, "move"),
}


@pytest.mark.behaviour("SC2", "SC6", "SC11", "SC16")
@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_each_cause_counts_against_the_one_budget_together_with_failures(name, failed):
    """Tasks that are down reduce the budget for all other operations."""
    begin, kind = CAUSES[name]
    cause = name.partition(" ")[0]

    async def main() -> None:
        w = World(a_region(4), repair_after_s=100_000)
        async with w.running():
            await w.deployed(a_job(TASKS, update=QUICK), quota=4)
            sick = break_tasks(w, failed)
            await w.until(lambda: w.endpoints_count(TASKS - failed))
            await begin(w)
            least = TASKS
            for _ in range(600):
                least = min(least, len(await w.endpoints()))
                await asyncio.sleep(0.1)
            assert least >= TASKS - 2, "at most the budget was ever down"
            events = (await w.cp.job_events("web")).events
            done = [e for e in events if (e.kind, e.cause) == (kind, cause)]
            mends = kind == "update" or cause == "profile"  # all are replaced, broken first
            if failed < 2 or mends:
                assert done, "it is an operation with its cause"
                assert least < TASKS - failed or failed == 2
            else:
                assert {e.task for e in done} <= sick, "nothing that serves goes"
        assert w.region.broken_rules == []

    run(main())


def break_tasks(w: World, number: int) -> set[int]:
    """Make the last tasks unhealthy permanently, except those on the machine under maintenance."""
    found = set[int]()
    for task in reversed(w.cp._jobs.get("web").tasks):
        if len(found) < number and task.placement is not None:
            if task.placement.machine == first(w):
                continue
            w.region.machines[task.placement.machine].report(
                f"web-{task.index}", health=Health.UNHEALTHY
            )
            found.add(task.index)
    return found
