"""The date that decisions use: it follows the wall clock, but ignores a step at first."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import EPOCH_S, run

from control_plane.api.clock import ClockAnchor
from control_plane.process import ends_before
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.date import BELIEVED_AFTER_S, Date
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import CLOCK, encode
from wire.errors import Busy


class Host:
    """A host with two clocks that the test sets."""

    def __init__(self) -> None:
        self.up_s, self.off_s = 100.0, EPOCH_S

    def boot(self) -> float:
        return self.up_s

    def wall(self) -> float:
        return self.up_s + self.off_s

    def date(self) -> Date:
        made = Date(self.wall, self.boot)
        made.update()
        return made


@pytest.mark.behaviour("BUG-CP9", "F-44")
@pytest.mark.parametrize("step_s", [-3_600.0, -3.0, 3.0, 7_200.0])
def test_a_step_is_believed_once_it_has_lasted(step_s: float):
    host = Host()
    date = host.date()
    host.off_s += step_s
    for _ in range(10):
        date.update()
        assert date.now() == EPOCH_S + host.up_s
        assert date.doubted_s == pytest.approx(step_s)
        host.up_s += BELIEVED_AFTER_S / 10
    date.update()
    assert date.now() == host.wall()
    assert date.doubted_s == 0.0


@pytest.mark.behaviour("BUG-CP9", "F-44")
def test_a_step_that_is_undone_or_changes_has_not_lasted():
    host = Host()
    date = host.date()
    for off_s in (7_200.0, 0.0, 7_200.0, 3_600.0, -900.0):
        host.off_s = EPOCH_S + off_s
        date.update()
        host.up_s += BELIEVED_AFTER_S * 0.9
        assert date.now() == EPOCH_S + host.up_s
    host.off_s = EPOCH_S
    date.update()
    assert date.now() == EPOCH_S + host.up_s


def test_a_clock_that_is_set_right_without_a_step_is_followed():
    host = Host()
    date = host.date()
    for _ in range(1000):
        host.up_s += 60.0
        host.off_s += 0.03  # 500 ppm, the fastest slew of the kernel
        date.update()
    assert date.now() == host.wall()
    assert host.off_s == pytest.approx(EPOCH_S + 30.0)


def a_life(host: Host, store: MemoryStore, boot_id: str = "one") -> tuple[Runtime, Anchor]:
    runtime = Runtime(host.wall, 0, host.boot)
    return runtime, Anchor(store, runtime, boot_id)


@pytest.mark.behaviour("BUG-CP9", "F-44")
def test_a_step_before_the_process_is_started_again_is_not_believed_either():
    """The date continues across restarts, until the host boots again."""

    async def main() -> None:
        host = Host()
        async with MemoryStore() as store:
            _, anchor = a_life(host, store)
            await anchor.load()
            running = asyncio.ensure_future(anchor.run())
            await asyncio.sleep(1)
            running.cancel()
            host.up_s += 60.0
            host.off_s += 7_200.0
            again, anchor = a_life(host, store)
            await anchor.load()
            assert again.date() == EPOCH_S + host.up_s
            booted, anchor = a_life(host, store, "another")
            await anchor.load()
            assert booted.date() == host.wall()
            unknown, anchor = a_life(host, store, "")
            await anchor.load()
            assert unknown.date() == host.wall()

    run(main())


@pytest.mark.behaviour("BUG-CP9", "AV2")
def test_each_new_leader_continues_from_its_host_date():
    """Another host led meanwhile. Formerly only the last host was remembered."""

    async def main() -> None:
        hosts = {"one": Host(), "two": Host()}
        async with MemoryStore() as store:
            kept = ClockAnchor(boot_id="old", booted_at=1.0)
            await store.txn({}, [Put(CLOCK, encode(kept))])  # as earlier releases store it
            old, anchor = a_life(Host(), store, "old")
            await anchor.load()
            assert old.booted_at == 1.0
            for boot, host in hosts.items():
                _, anchor = a_life(host, store, boot)
                await anchor.load()
                running = asyncio.ensure_future(anchor.run())
                await asyncio.sleep(1)
                running.cancel()
            hosts["one"].off_s += 466.0
            again, anchor = a_life(hosts["one"], store, "one")
            await anchor.load()
            assert again.date() == EPOCH_S + hosts["one"].up_s

    run(main())


@pytest.mark.behaviour("BUG-CP9")
def test_only_the_latest_boots_are_remembered():
    """A region that runs for years does not keep every boot of its hosts."""

    async def main() -> None:
        async with MemoryStore() as store:
            for number in range(70):
                known = ClockAnchor(boot_id=f"boot-{number:02}", booted_at=float(number))
                await store.txn({}, [Put(f"{CLOCK}/boot-{number:02}", encode(known))])
            _, anchor = a_life(Host(), store)
            await anchor.load()
            running = asyncio.ensure_future(anchor.run())
            await asyncio.sleep(1)
            running.cancel()
            keys = [entry.key for entry in (await store.list_prefix(CLOCK)).entries]
            assert len(keys) == 65
            assert f"{CLOCK}/boot-05" not in keys
            assert f"{CLOCK}/boot-06" in keys

    run(main())


def test_a_date_that_could_not_be_stored_is_stored_later():
    class Sick(MemoryStore):
        sick = True

        async def txn(self, *args, **kwargs):
            if self.sick:
                raise Busy("no space left")
            return await super().txn(*args, **kwargs)

    async def main() -> None:
        host = Host()
        async with Sick() as store:
            runtime, anchor = a_life(host, store)
            await anchor.load()
            running = asyncio.ensure_future(anchor.run())
            await asyncio.sleep(1)
            assert await store.get(f"{CLOCK}/one") is None
            store.sick = False
            await asyncio.sleep(120)
            first = await store.get(f"{CLOCK}/one")
            host.off_s += 7_200.0
            runtime.check_clocks()
            await asyncio.sleep(120)
            assert await store.get(f"{CLOCK}/one") == first
            host.up_s += BELIEVED_AFTER_S
            runtime.check_clocks()
            await asyncio.sleep(120)
            running.cancel()
            again, anchor = a_life(host, store)
            await anchor.load()
            assert again.date() == host.wall()

    run(main())


@pytest.mark.behaviour("BUG-CP60")
def test_a_standby_does_not_believe_a_step_of_its_clock():
    """Formerly the standby first read the date when it led, and a deadline seemed to have
    passed."""

    async def main() -> None:
        stepped_s = 0.0
        loop = asyncio.get_running_loop()
        runtime = Runtime(lambda: 1_800_000_000 + stepped_s + loop.time(), boot=loop.time)
        opening = loop.create_future()
        standing_by = asyncio.create_task(ends_before(asyncio.Event(), opening, runtime))
        await asyncio.sleep(100)
        stepped_s = 144.0
        await asyncio.sleep(100)
        opening.set_result("the store")
        assert await standing_by
        assert runtime.date() == pytest.approx(1_800_000_000 + loop.time(), abs=1.0)

    run(main())
