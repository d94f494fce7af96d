"""The rate limit of stops."""

import asyncio

from virtual_time import run

from control_plane.services.dispatcher import TokenBucket


def test_a_burst_passes_and_the_rest_goes_at_the_rate():  # P5
    async def main() -> list[float]:
        bucket, times = TokenBucket(per_s=2, burst=3), []
        loop = asyncio.get_running_loop()

        async def one() -> None:
            await bucket.take()
            times.append(loop.time())

        async with asyncio.TaskGroup() as group:
            for _ in range(7):
                group.create_task(one())
        await asyncio.sleep(10)
        await one()
        return times

    assert run(main()) == [0, 0, 0, 0.5, 1.0, 1.5, 2.0, 12.0]
