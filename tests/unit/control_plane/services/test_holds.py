"""Two-phase commit at the brokers: all or nothing, whichever component stops in between."""

from collections.abc import Mapping, Sequence

import pytest
from inventory import a_machine, assign, loaded

from agent.api import ProfileState
from control_plane.api.machine_commands import MarkDown, RaiseGeneration
from control_plane.api.machines import EventKind, UnavailabilityEvent
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.holds import Take
from control_plane.store import Operation
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, NotFound

pytestmark = pytest.mark.behaviour("AL12")

MACHINES = ("m1", "m2", "m3", "m4")
TAKES = {name: Take("front", "web") for name in MACHINES}


class Killed(BaseException):
    """The process ended here."""


class MortalStore(MemoryStore):
    """A store whose process dies before or after its n-th transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.after = False

    def dies(self, at: int, *, after: bool) -> None:
        self.left, self.after = at, after

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        if self.left is None:
            return await super().txn(compare, operations)
        if self.left < 0 or (self.left == 0 and not self.after):
            self.left = -1
            raise Killed
        revision = await super().txn(compare, operations)
        if self.left == 0:
            self.left = -1
            raise Killed
        self.left -= 1
        return revision


async def four_machines(store: MemoryStore) -> Brokers:
    brokers = await loaded(store)
    await brokers.add({name: a_machine(name, f"dc{i // 2}") for i, name in enumerate(MACHINES)})
    return brokers


async def test_prepared_machines_are_assigned_once_by_the_commit() -> None:
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        await brokers.prepare("t1", TAKES)
        assert brokers.in_doubt() == {"t1": list(MACHINES)}
        assert [r.entitlement for r in brokers.table.records()] == [FREE] * 4
        await brokers.prepare("t1", TAKES)  # repeating it is no error
        done = await brokers.commit("t1")
        assert sorted(r.machine for r in done) == list(MACHINES)
        for record in brokers.table.records():
            assert (record.entitlement, record.profile_wanted) == ("front", "web")
            assert (record.assignment_generation, record.hold) == (1, None)
            assert record.profile_state is ProfileState.NONE
        assert await brokers.commit("t1") == []
        await brokers.abort("t1")
        assert [r.machine for r in brokers.held("front")] == list(MACHINES)


async def test_an_abort_leaves_no_trace() -> None:
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        before = brokers.table.records()
        await brokers.prepare("t1", TAKES)
        await brokers.abort("t1")
        await brokers.abort("t1")
        assert brokers.table.records() == before
        assert brokers.in_doubt() == {}


async def test_every_blocking_machine_is_named_and_none_is_held() -> None:
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        await brokers.add({"m5": a_machine("m5"), "m6": a_machine("m6")})
        await assign(brokers.of("m1"), "m1", "other", "web")
        await brokers.carry_out("m2", MarkDown(reason="test"))
        await brokers.prepare("t0", {"m3": Take("other", "web")})
        event = UnavailabilityEvent(
            event_id="e", kind=EventKind.MAINTENANCE, reason="new power supply", start=1500.0
        )
        await brokers.of("m5").change_many(
            ["m5"], lambda r: a_machine(r.machine, unavailability=(event,))
        )
        takes = {name: Take("front", "web") for name in (*MACHINES, "m5", "m6")}
        with pytest.raises(Conflict) as caught:
            await brokers.prepare("t1", takes)
        assert {e.field: e.reason for e in caught.value.errors} == {
            "m1": "is in entitlement 'other'",
            "m2": "is down",
            "m3": "is held by transaction 't0'",
            "m5": "will be taken for maintenance: new power supply",
        }
        assert brokers.in_doubt() == {"t0": ["m3"]}
        assert brokers.table.get("m6").hold is None
        with pytest.raises(NotFound, match="m9"):
            await brokers.prepare("t2", {"m4": Take("front", "web"), "m9": Take("front", "web")})
        assert brokers.in_doubt() == {"t0": ["m3"]}


async def test_a_held_machine_is_neither_assigned_nor_released_nor_removed() -> None:
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        await brokers.prepare("t1", TAKES)
        revision = brokers.table.revision("m1")
        with pytest.raises(Conflict, match="m1 is held by transaction 't1'"):
            await assign(brokers.of("m1"), "m1", "other", "web")
        with pytest.raises(Conflict, match="it is held by transaction 't1'"):
            await brokers.release("m1", revision=revision)
        with pytest.raises(Conflict, match="it is held by transaction 't1'"):
            await brokers.remove("m1")
        with pytest.raises(Conflict, match="cannot move machine 'm1'"):
            await brokers.move("m1", "dc1")


async def test_several_are_released_together_or_not_at_all() -> None:
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        await brokers.prepare("t1", TAKES)
        await brokers.commit("t1")
        revisions = {name: brokers.table.revision(name) for name in ("m1", "m2")}
        await brokers.carry_out("m2", RaiseGeneration(above=0))
        with pytest.raises(Conflict, match="'m2': it was changed by another request"):
            await brokers.of("m1").release_many(revisions)
        assert len(brokers.held("front")) == 4
        for name in MACHINES:
            await brokers.release(name, revision=brokers.table.revision(name))
        assert len(brokers.held(FREE)) == 4


async def allocate(brokers: Brokers, decided: set[str]) -> None:
    """Acts as a coordinator; `decided` is the record in its store."""
    await brokers.prepare("t1", TAKES)
    decided.add("t1")
    await brokers.commit("t1")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(4))
async def test_a_crash_at_any_transaction_leaves_all_or_nothing(at: int, after: bool) -> None:
    store = MortalStore()
    async with store:
        brokers = await four_machines(store)
        decided: set[str] = set()
        store.dies(at, after=after)
        with pytest.raises(Killed):
            await allocate(brokers, decided)
    store.left = None
    async with store:
        brokers = await loaded(store)
        for transaction, machines in brokers.in_doubt().items():
            assert transaction == "t1"
            assert all(brokers.table.get(name).entitlement == FREE for name in machines)
            await (brokers.commit if transaction in decided else brokers.abort)(transaction)
        held = [r.machine for r in brokers.held("front")]
        assert held == (list(MACHINES) if decided else [])
        assert brokers.in_doubt() == {}
        assert all(record.hold is None for record in brokers.table.records())
        again = await loaded(store)
        assert again.table.records() == brokers.table.records()


async def test_a_transaction_of_four_machines_in_two_data_centers_writes_four_times() -> None:
    """One write for each phase and broker, so the crash test above covers all writes."""
    async with MemoryStore() as store:
        brokers = await four_machines(store)
        before = (await store.list_prefix("")).revision
        await allocate(brokers, set())
        assert (await store.list_prefix("")).revision == before + 4
