"""Two processes on the stores of the same brokers: a machine is never in two entitlements."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_commit import WHOLE, machines, stocked
from test_place import a_job

from control_plane.allocator.standalone import allocator_over
from control_plane.api.capacity import EntitlementSpec
from control_plane.broker.brokers import Brokers
from control_plane.broker.holds import Take
from control_plane.runtime.runtime import Runtime
from control_plane.store import Entry, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.outcomes import OUTCOMES, Slots, WriteAttempt
from wire.errors import Conflict, UnknownOutcome

pytestmark = pytest.mark.behaviour("RB9")


class Lossy:
    """Loses one write with several keys before the store makes it; its outcome is unknown."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.loses = False
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        """Runs before the first query of the outcome."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str) -> Entry | None:
        if key.startswith(OUTCOMES) and not self.loses and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await self._inner.get(key)

    async def txn(self, compare, operations) -> int:
        if self.loses and len(operations) > 1:
            self.loses = False
            raise UnknownOutcome("the answer was lost")
        return await self._inner.txn(compare, operations)


@pytest.mark.behaviour("BUG-AL32")
@pytest.mark.parametrize("writers", [("one", "two"), ("", "")])
async def test_a_lost_write_is_not_taken_for_made_because_another_process_made_one(writers):
    """Slots were named by table, so another writer's slot reported "made"."""
    async with MemoryStore() as store:
        await stocked(store, machines(4), {})
        lossy = Lossy(store)
        first, second = (
            Brokers(of, Runtime(), writer=writer)  # type: ignore[arg-type]
            for of, writer in zip((lossy, store), writers, strict=True)
        )
        for brokers in (first, second):
            await brokers.load()
        takes = {
            brokers: {name: Take(pool, pool) for name in names}
            for brokers, pool, names in ((first, "a", ("m0", "m1")), (second, "b", ("m0", "m2")))
        }
        # Both have a slot already. If they share one, they know it at the same revision.
        lossy.meanwhile = lambda: second.prepare("two:1-1", takes[second])
        lossy.loses = True
        with pytest.raises(Exception, match="m0"):
            await first.prepare("one:1-1", takes[first])
        await second.commit("two:1-1")
        await first.commit("one:1-1")
        owners = {}
        for brokers in (first, second):
            owners[brokers] = {r.machine for r in brokers.table.records() if r.entitlement}
        assert owners[second] == {"m0", "m2"}
        record = await store.get("machines/dc1/m1")
        assert record is not None
        assert b'"a"' not in record.value


@pytest.mark.behaviour("BUG-AL32")
async def test_a_slot_that_another_writer_moved_is_read_again():
    """Each later attempt was refused because it compared an outdated revision."""
    async with MemoryStore() as store:
        one, other = Slots(store, "same"), Slots(store, "same")
        both = [Put("a", b""), Put("b", b"")]
        for slots in (one, other):
            key, revision = await slots.take()
            slots.release(key, revision)
        await WriteAttempt(one, {}, both).make()
        with pytest.raises(Conflict):
            await WriteAttempt(other, {}, both).make()
        assert await WriteAttempt(other, {}, both).make()


async def test_processes_with_names_share_no_slot_and_find_theirs_after_a_restart():
    async with MemoryStore() as store:
        both = [Put("a", b""), Put("b", b"")]
        for _ in range(2):
            for writer in ("", "one", "two"):
                await WriteAttempt(Slots(store, "machines/dc1", writer), {}, both).make()
        keys = [entry.key for entry in (await store.list_prefix(OUTCOMES)).entries]
        assert keys == [f"{OUTCOMES}machines/dc1/{name}0" for name in ("", "one/", "two/")]


async def test_two_processes_place_at_once_and_share_no_machine():
    async with MemoryStore() as brokers, MemoryStore() as one, MemoryStore() as two:
        await stocked(brokers, machines(12), {})
        for store, pool in ((one, "front"), (two, "back")):
            await stocked(store, [], {pool: EntitlementSpec(machines=6)})
        async with (
            allocator_over(one, {"dc1": brokers}, name="one") as first,
            allocator_over(two, {"dc1": brokers}, name="two") as second,
        ):
            for _ in range(3):  # conflicts show each process the other's machines
                await asyncio.gather(
                    *(first.place(a_job(2, f"a{n}", limits=WHOLE)) for n in range(3)),
                    *(
                        second.place(a_job(2, f"b{n}", entitlement="back", limits=WHOLE))
                        for n in range(3)
                    ),
                    return_exceptions=True,
                )
            used = [
                {c.machine.name for claims in a.index.claims.values() for c in claims}
                for a in (first, second)
            ]
            assert used[0]
            assert used[1]
            assert not used[0] & used[1]
            truth = Brokers(one, Runtime(), {"dc1": brokers})
            await truth.load()
            for names, pool in zip(used, ("front", "back"), strict=True):
                assert names <= {record.machine for record in truth.held(pool)}
