"""What a follower and a checker record about single machines, on virtual time."""

import asyncio
from types import SimpleNamespace

import pytest
from virtual_time import run
from world import World, a_region

from control_plane.agents.polled import CONNECT_S
from control_plane.api.settings import SchedulerSettings
from control_plane.health.checker import _policies
from control_plane.health.core.parts import Standing
from wire.errors import Unreachable

DIGEST = "sha256:" + "7" * 64


def test_machines_count_in_their_part_from_the_start_of_a_process_as_they_are_recorded():
    """A machine that was down before counts as lost at once, without a new silence."""

    async def main() -> None:
        w = World(a_region())
        async with w.store:
            async with w.control_plane() as w.cp:
                await w.set_up(3)
                await w.until(w.all_answer)
                w.region.machines["m1"].power_off()
                await w.until(lambda: w.cp._checker._watches["m1"].down_at is not None)
            async with w.control_plane() as w.cp:
                while len(w.cp._checker._watches) < 3:
                    await asyncio.sleep(0)
                watches = w.cp._checker._watches
                assert watches["m1"].standing is Standing.LOST
                region = watches["m1"].rack.path[-1]
                assert (region.machines, region.lost) == (3, 1)

    run(main())


def test_an_image_that_a_machine_got_is_known_without_a_list_of_all_it_has():
    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            m1, seen = w.region.machines["m1"], w.cp._observations.observation("m1")
            m1.images.add(DIGEST)
            m1.send_event("image", DIGEST)
            await w.until(lambda: DIGEST in seen.images, within_s=5)

    run(main())


def test_a_silent_agent_is_polled_about_once_a_second(monkeypatch):
    async def main() -> None:
        w = World(a_region())
        tries = list[float]()
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            follower = w.cp._checker._follower
            attempt = follower._attempt

            async def counted(name, record):
                tries.append(w.runtime.now())
                if len(tries) > 1_000:
                    await asyncio.sleep(1)
                return await attempt(name, record)

            monkeypatch.setattr(follower, "_attempt", counted)
            w.region.machines["m1"].power_off()
            await w.until(lambda: not w.cp._observations.observation("m1").answering)
            tries.clear()
            await asyncio.sleep(60)
            assert 20 < len(tries) < 45  # each try takes a second, and each pause as well

    run(main())


def test_a_machine_that_another_process_follows_now_is_released_at_once():
    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            checker = w.cp._checker
            checker._follower._calls_agent = lambda record: record.machine != "m1"
            checker.update_following("m1")
            await asyncio.sleep(0.1)
            assert checker._follower._followed == {"m2", "m3"}

    run(main())


def test_a_host_is_alive_until_the_next_probe_is_due():
    settings = SchedulerSettings()
    _, graces, _ = _policies(settings)
    assert graces.alive_s > settings.poll_patience_s + CONNECT_S + settings.poll_retry_s


@pytest.mark.behaviour("BUG-UX60")
def test_a_machine_may_become_doubtful_while_its_lost_stream_waits_for_a_turn():
    """Formerly the control plane ended if a command failed meanwhile."""

    class LostStream:
        async def next(self):
            raise Unreachable("the connection was lost")

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            follower = w.cp._checker._follower
            follower._calls_agent = lambda record: record.machine != "m1"
            follower.update_following("m1")  # the test follows only the stream below
            await w.until(lambda: "m1" not in follower._followed)
            waits, turn = asyncio.Event(), asyncio.Event()

            async def checkpoint() -> None:
                waits.set()
                await turn.wait()

            follower._runtime = SimpleNamespace(checkpoint=checkpoint)
            events = asyncio.create_task(follower._next_events("m1", LostStream()))
            await waits.wait()
            follower._observations.refused("m1", "a-0", "no answer within 5 s", doubtful=True)
            turn.set()
            with pytest.raises(Unreachable, match="the connection was lost"):
                await events

    run(main())


@pytest.mark.behaviour("BUG-CP156")
def test_a_machine_that_is_removed_just_before_its_verdict_is_not_held_back():
    """Formerly the checker kept a removed machine, and showed it as held back, until its end."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.set_up(3)
            await w.until(w.all_answer)
            checker = w.cp._checker
            runtime, watches = checker._runtime, dict(checker._watches)

            class Removes:
                """The runtime, in which another actor removes machines at each checkpoint."""

                def __getattr__(self, name: str) -> object:
                    return getattr(runtime, name)

                async def checkpoint(self) -> None:
                    silent = [m for m in watches.values() if m.standing is Standing.LOST]
                    for watch in silent:
                        if watch.machine in checker._watches:
                            checker._forget(watch)

            for machine in w.region.machines.values():
                machine.power_off()
            checker._runtime = Removes()
            await asyncio.sleep(60)
            assert checker._watches == {}
            assert checker.held_back() == []

    run(main())
