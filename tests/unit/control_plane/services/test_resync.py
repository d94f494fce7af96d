"""An idle region causes almost no work of the allocator."""

import asyncio

import pytest
from virtual_time import run
from world import World, a_region

from control_plane.api.machine_commands import RaiseGeneration

pytestmark = pytest.mark.behaviour("BUG-CP10")


@pytest.mark.behaviour("BUG-CP10")
def test_unchanged_machines_are_compared_every_ten_minutes_at_most():
    """All machines were compared every half minute, at 20 µs each."""

    async def main() -> None:
        w = World(a_region(6))
        async with w.running():
            await w.set_up()
            await w.until(w.all_answer)
            await asyncio.sleep(60)
            allocator, read = w.cp._allocator, []
            real = allocator._as_indexed
            allocator._as_indexed = lambda record: read.append(record.machine) or real(record)
            await asyncio.sleep(3600)
            assert len(read) <= 6 * 6
            allocator._counted.note(w.cp._broker.table.get("m1"))
            read.clear()
            await w.cp._broker.carry_out("m1", RaiseGeneration(above=1))
            await asyncio.sleep(w.settings.resync_s + 5)
            assert set(read) == {"m1"}

    run(main())


@pytest.mark.behaviour("BUG-CP10")
def test_a_checkpoint_follows_each_hundred_updated_machines():
    """A thousand machines at once blocked the loop for 100 ms and more."""

    async def main() -> None:
        w = World(a_region(450))
        async with w.running():
            for machine in w.region.machines.values():
                await w.cp.joined(machine.join())
            allocator = w.cp._allocator
            read = [0]
            real, checkpoint = allocator._as_indexed, w.runtime.checkpoint

            def count_read(record):
                read[-1] += 1
                return real(record)

            async def turn() -> None:
                read.append(0)
                await checkpoint()

            allocator._as_indexed, w.runtime.checkpoint = count_read, turn
            await allocator.resync.compare()
            allocator.usability.awaited = dict.fromkeys(allocator.index.machines)
            await allocator.update_with_time()
            assert sum(read) >= 2 * 450
            assert max(read) <= 100

    run(main())
