"""A region so large that asking all machines takes longer than a silence that counts."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import RUNTIME, clock, run
from world import World, a_job, a_region

from control_plane.api.machines import MachineState
from control_plane.runtime.runtime import SteppedRuntime


class Crowded(SteppedRuntime):
    """A process in which each machine's turn takes long, as with 50,000 machines."""

    def __init__(self) -> None:
        super().__init__(clock, 0)
        self.turn = asyncio.Lock()

    async def checkpoint(self) -> None:
        async with self.turn:
            await asyncio.sleep(0.5)


@pytest.mark.behaviour("BUG-CP3")
def test_a_machine_without_a_probe_so_far_is_not_silent():
    """Silence counts from the first request, not from the start of the process."""

    async def main() -> None:
        w = World(a_region(90))
        async with w.store:
            async with w.control_plane() as w.cp:
                await w.set_up(90)
                await w.cp.apply_job(a_job(90))
                await w.stable()
                before = w.alive()
            w.runtime, began = Crowded(), RUNTIME.now()
            async with w.control_plane() as w.cp:
                seen = set[MachineState]()
                while not await w.all_answer():
                    await asyncio.sleep(1)
                    machines = (await w.cp.list_machines()).machines
                    seen |= {view.record.state for view in machines}
                assert RUNTIME.now() - began > 3 * w.settings.down_after_s
                assert seen == {MachineState.UP}
                assert w.alive() == before

    run(main())


class Gated(SteppedRuntime):
    """A process whose turn is used up until the test opens it."""

    def __init__(self) -> None:
        super().__init__(clock, 0)
        self.open, self.waiting = asyncio.Event(), 0
        self.open.set()

    async def checkpoint(self) -> None:
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1


def test_machines_lost_in_one_turn_are_checked_in_several():
    """With an MSB thousands of connections break at once, and each loss wakes jobs and other
    roles."""

    async def main() -> None:
        w = World(a_region(12))
        runtime = w.runtime = Gated()
        async with w.store, w.control_plane() as w.cp:
            await w.set_up(12)
            await w.until(w.all_answer)
            runtime.open.clear()
            for machine in w.region.machines.values():
                machine.power_off()
            before = runtime.waiting
            while runtime.waiting < before + 12:
                await asyncio.sleep(1)
            observations = [w.cp._observations.observation(name) for name in w.region.machines]
            assert all(observation.answering for observation in observations)
            runtime.open.set()
            await w.until(lambda: not any(observation.answering for observation in observations))

    run(main())
