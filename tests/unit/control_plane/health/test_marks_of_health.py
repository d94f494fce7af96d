"""What happens to marks that the store refuses, and from when on silence counts."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from virtual_time import run
from world import World, a_region

from control_plane.health.marker import Marker, StillHolds
from wire.errors import Busy, Conflict, NotFound, TwineError


class Refusing:
    """A broker that refuses every write."""

    def __init__(self, why: Exception) -> None:
        self.why = why

    async def down(self, reasons: Mapping[str, str], still: StillHolds) -> None:
        raise self.why

    async def up(self, names: Sequence[str], still: StillHolds) -> None:
        raise self.why


@pytest.mark.behaviour("BUG-CP4")
@pytest.mark.parametrize(
    ("why", "expected"),
    [
        (Busy("the disk is full"), ["the disk is full"]),
        (OSError("no such thing"), ["no such thing"]),
        (NotFound("m1 is gone"), []),
    ],
)
def test_silences_begin_again_when_a_mark_was_not_written(why: TwineError, expected: list[str]):
    """A conclusion that the store refused is drawn again. A removed machine is no error."""

    async def main() -> None:
        troubles, written = list[str](), list[list[str]]()
        marker = Marker(Refusing(why), troubles.append)
        marker.down("m1", "it is silent")
        running = asyncio.create_task(marker.run(lambda _: True, lambda _: True, written.append))
        await asyncio.sleep(1)
        running.cancel()
        assert troubles == expected
        assert written == [["m1"]]

    run(main())


@pytest.mark.parametrize(("poll_wait_s", "worry_s"), [(3.0, 6.5), (8.0, 5.0)])
def test_a_machine_is_silent_once_its_last_poll_is_overdue(poll_wait_s: float, worry_s: float):
    """The limit is 10 s. A poll of 3 s may end until 6.5 s of it are over, but silence never counts
    before half of it."""

    async def main() -> None:
        w = World(a_region(), down_after_s=10.0, poll_wait_s=poll_wait_s)
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            watch = w.cp._checker._watches["m1"]
            w.region.machines["m1"].power_off()
            refused = accepted = 0.0
            while not accepted:
                await asyncio.sleep(0.1)
                silent_s = watch.silent_s(w.runtime.now(), float("-inf"))
                try:
                    w.cp._checker.confirm_down(["m1"], "no light on it")
                    accepted = silent_s
                except Conflict:
                    refused = silent_s
            assert refused < worry_s <= accepted < worry_s + 0.2

    run(main())
