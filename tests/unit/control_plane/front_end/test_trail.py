"""The audit log: bounded, paged, and complete up to every acknowledged request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.api.people import AuditEntry, Outcome
from control_plane.front_end.trail import (
    MAX_SCAN,
    REFUSALS_IN_ALL,
    REFUSALS_PER_MINUTE,
    Query,
    Trail,
)
from control_plane.runtime.runtime import Runtime
from control_plane.store import Operation, Put
from control_plane.store.memory import MemoryStore
from wire.errors import Busy

ENTRY = AuditEntry(
    sequence=0,
    at=0.0,
    caller="user:ann",
    address="10.0.0.1",
    request_id="r",
    action="apply_job",
    object="job/web",
)
REFUSED = replace(ENTRY, outcome=Outcome.REFUSED)


class Full(MemoryStore):
    """Refuses writes once `full` is set."""

    full = False

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        if self.full:
            raise Busy("the store cannot be used: disk full", hint="make room")
        return await super().txn(compare, operations)


async def written(store: MemoryStore, count: int, keep: int = 1000) -> Trail:
    trail = Trail(store, Runtime(wall=iter(range(1_000_000)).__next__), keep)
    await trail.load()
    for i in range(count):
        entry = await trail.begin(replace(ENTRY, object=f"job/{i % 7}"))
        await trail.end(replace(entry, outcome=Outcome.DONE))
    return trail


def test_entries_are_found_by_caller_object_and_time_newest_first() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, 20)
            await trail.begin(replace(ENTRY, caller="host:vm1", also=["machine/m1"]))
            found = await trail.page(Query())
            assert [e.sequence for e in found.entries] == list(range(21, 0, -1))
            assert [e.sequence for e in (await trail.page(Query(object="job/3"))).entries] == [
                18,
                11,
                4,
            ]
            assert len((await trail.page(Query(who="ann"))).entries) == 20
            assert [e.sequence for e in (await trail.page(Query(object="machine/m1"))).entries] == [
                21
            ]
            since = (await trail.page(Query(since=15.0))).entries
            assert {e.at >= 15.0 for e in since} == {True}

    asyncio.run(main())


@pytest.mark.behaviour("BUG-CP92")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_entries_before_a_time_at_which_the_clock_was_wrong_are_found(is_restarted: bool) -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, 20)
            for wall in (5.0, 30.0):
                if is_restarted:
                    trail = Trail(store, Runtime())
                    await trail.load()
                trail._runtime = Runtime(wall=lambda wall=wall: wall)
                await trail.begin(ENTRY)
            found = (await trail.page(Query(since=15.0))).entries
            assert [e.at for e in found] == [30.0, 19.0, 18.0, 17.0, 16.0, 15.0]

    asyncio.run(main())


@given(st.integers(0, 60), st.integers(1, 25), st.sampled_from(["", "job/3", "job/9"]))
def test_pages_together_are_the_whole_log(count: int, limit: int, about: str) -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, count)
            whole = (await trail.page(Query(object=about, limit=1000))).entries
            pieces: list[AuditEntry] = []
            before = 0
            while True:
                page = await trail.page(Query(before=before, limit=limit, object=about))
                assert len(page.entries) <= limit
                pieces += page.entries
                before = page.next
                if not before:
                    break
            assert pieces == whole

    asyncio.run(main())


def test_a_restart_continues_where_the_log_ended_and_drops_old_entries() -> None:
    async def main() -> None:
        store = MemoryStore()
        async with store:
            await written(store, 30, keep=10)
            assert len((await store.list_prefix("audit/")).entries) == 10
        async with store:
            trail = Trail(store, Runtime(), keep=5)
            await trail.load()
            entry = await trail.begin(ENTRY)
            assert entry.sequence == 31
            kept = [e.sequence for e in (await trail.page(Query())).entries]
            assert kept == [31, 30, 29, 28, 27]

    asyncio.run(main())


def test_a_head_that_is_older_than_the_newest_entry_overwrites_nothing() -> None:
    """Writes of two requests may reach the disk in an order other than that of their start."""

    async def main() -> None:
        async with MemoryStore() as store:
            await written(store, 9)
            from control_plane.store import Put

            await store.txn({}, [Put("audit-head", b"3")])
            trail = Trail(store, Runtime())
            await trail.load()
            assert (await trail.begin(ENTRY)).sequence == 10

    asyncio.run(main())


def test_an_entry_without_an_outcome_stays_begun() -> None:
    async def main() -> None:
        store = MemoryStore()
        async with store:
            trail = Trail(store, Runtime())
            await trail.load()
            await trail.begin(ENTRY)
        async with store:
            again = Trail(store, Runtime())
            await again.load()
            (entry,) = (await again.page(Query())).entries
            assert entry.outcome is Outcome.BEGUN

    asyncio.run(main())


def test_a_change_is_refused_if_its_audit_entry_cannot_be_written() -> None:
    async def main() -> None:
        async with Full() as store:
            trail = Trail(store, Runtime())
            await trail.load()
            entry = await trail.begin(ENTRY)
            store.full = True
            await trail.end(replace(entry, outcome=Outcome.DONE))
            assert trail.lost == 1
            await trail.refused(REFUSED)
            with pytest.raises(Busy, match="apply_job: the audit log cannot be written"):
                await trail.begin(ENTRY)

    asyncio.run(main())


def test_refused_attempts_cannot_fill_the_log() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = Trail(store, Runtime())
            await trail.load()
            for _ in range(1000):
                await trail.refused(replace(REFUSED, caller="user:mallory"))
            for i in range(1000):
                await trail.refused(
                    replace(REFUSED, caller="anyone", address=f"10.0.{i // 250}.{i % 250}")
                )
            entries = (await trail.page(Query(limit=1000))).entries
            mallory = [e for e in entries if e.caller == "user:mallory"]
            assert len(mallory) == REFUSALS_PER_MINUTE
            assert len(entries) == REFUSALS_IN_ALL
            assert {e.outcome for e in entries} == {Outcome.REFUSED}

    asyncio.run(main())


def test_suppressed_refusals_are_counted_in_the_next_entry() -> None:
    class Later(Runtime):
        moment = 0.0

        def now(self) -> float:
            return self.moment

    async def main() -> None:
        async with MemoryStore() as store:
            runtime = Later()
            trail = Trail(store, runtime)
            await trail.load()
            for _ in range(REFUSALS_PER_MINUTE + 25):
                await trail.refused(REFUSED)
            runtime.moment = 61.0
            await trail.refused(REFUSED)
            assert (await trail.page(Query(limit=1))).entries[0].suppressed == 25

    asyncio.run(main())


def test_a_search_without_matches_ends_at_its_scan_limit() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, 10)
            trail._last = MAX_SCAN * 3  # as after years of use, with most entries dropped
            page = await trail.page(Query(object="job/none"))
            assert page.entries == []

    asyncio.run(main())


def test_a_long_reason_is_cut() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, 0)
            entry = await trail.begin(replace(ENTRY, detail="x" * 10_000, also=["m"] * 5000))
            assert (len(entry.detail), len(entry.also)) == (500, 100)

    asyncio.run(main())


@pytest.mark.behaviour("BUG-CP88")
def test_the_log_is_shown_while_no_entry_can_be_written() -> None:
    """Formerly after 200 failed writes the newest page had no entry, and seemed to be the last."""

    async def main() -> None:
        async with Full() as store:
            trail = await written(store, 20)
            store.full = True
            for _ in range(500):
                with pytest.raises(Busy):
                    await trail.begin(ENTRY)
            found = (await trail.page(Query())).entries
            assert [e.sequence for e in found] == list(range(20, 0, -1))

    asyncio.run(main())


@pytest.mark.behaviour("BUG-UX175")
def test_a_damaged_entry_is_left_out() -> None:
    """Formerly each page that contains it was an internal error."""

    async def main() -> None:
        async with MemoryStore() as store:
            trail = await written(store, 3)
            await store.txn({}, [Put("audit/0000000000000002", b"no JSON")])
            assert [e.sequence for e in (await trail.page(Query())).entries] == [3, 1]

    asyncio.run(main())
