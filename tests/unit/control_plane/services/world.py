"""A region with its control plane on virtual time, and queries of tests about both."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager

from fake_agents import IMAGE, Region, find_image
from virtual_time import clock, run

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase, JobProbe, JobSpec
from control_plane.api.settings import SchedulerSettings
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from control_plane.task_control.controllers import CallController, no_controller


def a_region(machines: int = 3) -> Region:
    """Return the shape of the lab: two data centers, three MSBs."""
    region = Region()
    msbs = [("dc1", "msb1"), ("dc1", "msb2"), ("dc2", "msb3")]
    for i in range(machines):
        region.add(f"m{i + 1}", *msbs[i % 3])
    return region


def a_job(tasks: int = 6, **changes) -> JobSpec:
    values = {
        "name": "web",
        "entitlement": "front",
        "tasks": tasks,
        "image": IMAGE,
        "command": ["/bin/serve", "${port:http}"],
        "ports": ["http"],
        "probe": JobProbe(port="http"),
        "limits": Limits(memory_max_bytes=128 << 20),
    }
    return JobSpec(**(values | changes))


class World:
    """A region, its control plane, and queries of tests about both."""

    def __init__(self, region: Region, store: MemoryStore | None = None, **settings) -> None:
        self.region = region
        self.store = store or MemoryStore(strict=True)
        self.settings = SchedulerSettings(**({"join_grace_s": 0} | settings))
        self.runtime = SteppedRuntime(clock, seed=0)
        self.controllers: CallController = no_controller
        self.cp: ControlPlane

    def control_plane(self) -> ControlPlane:
        agent, runtime = self.region.agent, self.runtime
        return ControlPlane(
            self.store,
            agent,
            runtime,
            self.settings,
            find_image,
            call_controller=self.controllers,
            boot_id="this boot",
        )

    @asynccontextmanager
    async def running(self):
        async with self.store:
            cp = self.control_plane()
            async with cp:
                self.cp = cp
                yield self

    async def set_up(self, quota: int = 3, **spec) -> None:
        for machine in self.region.machines.values():
            await self.cp.joined(machine.join())
        spec = {"machines": quota, "host_profile": "web"} | spec
        await self.cp.capacity.put_entitlement("front", EntitlementSpec(**spec))

    async def until(self, condition: Callable[[], object], within_s: float = 120) -> None:
        async with asyncio.timeout(within_s):
            while not await maybe(condition()):
                await asyncio.sleep(0.1)

    async def stable(self, name: str = "web", within_s: float = 120) -> None:
        async def is_stable() -> bool:
            return (await self.cp.get_job(name)).phase is JobPhase.STABLE

        await self.until(is_stable, within_s)

    async def all_answer(self) -> bool:
        return all(view.ready for view in (await self.cp.list_machines()).machines)

    async def deployed(self, spec: JobSpec | None = None, quota: int = 3) -> "World":
        await self.set_up(quota)
        await self.cp.apply_job(spec or a_job())
        await self.stable()
        return self

    def alive(self) -> Counter[str]:
        return Counter({m: len(tasks) for m, tasks in self.region.where().items()})

    async def endpoints(self) -> list[str]:
        return [e.task for e in (await self.cp.endpoints("web")).endpoints]

    async def endpoints_count(self, count: int) -> bool:
        return len(await self.endpoints()) == count


async def maybe(value):
    return await value if asyncio.iscoroutine(value) else value


def scenario(**settings):
    """Run the body in a new world of three machines, and assert that no rule was broken."""

    def decorate(body):
        def test() -> None:
            async def main() -> None:
                world = World(a_region(), **settings)
                async with asyncio.timeout(20_000):
                    async with world.running():
                        await body(world)
                assert world.region.broken_rules == []

            run(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate
