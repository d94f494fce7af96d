"""A store that can never write again: readiness reports it, and the process ends."""

import asyncio

import pytest
from virtual_time import run
from world import World, a_region

from control_plane.store.memory import MemoryStore
from wire.errors import Busy


class Breakable(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.why = ""
        self.broken = asyncio.Event()

    def breaks(self, why: str) -> None:
        self.why = why
        self.broken.set()

    def failure(self) -> str:
        return self.why

    async def wait_failed(self) -> None:
        await self.broken.wait()
        raise Busy(self.why)


@pytest.mark.behaviour("BUG-CP13")
def test_a_broken_store_is_seen_by_readiness_and_ends_the_process() -> None:
    """Writes hung while readiness reported no problem."""

    async def main() -> None:
        store = Breakable()
        world = World(a_region(), store)
        async with world.running():
            await world.set_up()
            assert (await world.cp.ready()).ok
            ended = asyncio.ensure_future(world.cp.wait_failed())
            store.breaks("the store cannot be used: its writer has ended")
            assert (await world.cp.ready()).detail == store.why
            with pytest.raises(Busy, match="its writer has ended"):
                await ended
            assert not (await world.cp.ready()).ok

    run(main())
