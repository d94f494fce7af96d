"""Writers of one job at the same time: each write is done, or refused with what to try."""

import asyncio

import pytest
from world import World, a_job, scenario

from wire.errors import Conflict


@pytest.mark.behaviour("BUG-CP113")
@scenario()
async def test_a_rollback_to_a_version_that_other_writes_removed_is_refused(world: World) -> None:
    """It failed with a KeyError, which callers saw as a bug of the server."""

    async def release(number: int) -> None:
        await world.cp.apply_job(a_job(environment={"N": str(number)}))
        await world.stable()

    await world.deployed()
    await release(2)
    control, others_wrote = world.cp._control, asyncio.Event()
    find = control._find_image

    async def find_slowly(digest):
        control._find_image = find
        await others_wrote.wait()
        return await find(digest)

    control._find_image = find_slowly
    rollback = asyncio.create_task(world.cp.rollback_job("web"))
    await world.until(lambda: control._find_image is find)
    await release(3)
    await release(4)
    others_wrote.set()
    with pytest.raises(Conflict, match="was changed by another request") as refused:
        await rollback
    assert refused.value.hint == "roll back again"
    assert (await world.cp.get_job("web")).record.version == 4
