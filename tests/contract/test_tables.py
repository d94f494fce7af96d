"""The owner's table shows the content of the store, whatever the outcome of a write."""

import asyncio
import random

import pytest
from faulty_store import MADE, UNANSWERED, FaultyStore, Outcome

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.runtime.readable import Readable
from control_plane.runtime.table import Table
from control_plane.store import Put, Store, bulk
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy, NotFound, UnknownOutcome

PREFIX = "entitlements/"


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path) -> Store:
    return MemoryStore(history=40) if request.param == "memory" else SqliteStore(tmp_path, 40)


def record(name: str, machines: int = 1) -> EntitlementRecord:
    return EntitlementRecord(name=name, spec=EntitlementSpec(machines=machines))


def owner(store: Store) -> Table[EntitlementRecord]:
    return Table(store, PREFIX, EntitlementRecord, "entitlement", history=1000)


class Follower:
    """Records the changes that a listener receives, and checks that each follows the one before."""

    def __init__(self, table: Readable[EntitlementRecord]) -> None:
        self.known: dict[str, EntitlementRecord] = {}
        table.listen(self.record_change)

    def record_change(self, name: str, before: object, after: EntitlementRecord | None) -> None:
        assert self.known.get(name) == before
        self.known.pop(name, None)
        if after is not None:
            self.known[name] = after


def view(table: Readable[EntitlementRecord]) -> list[tuple[str, EntitlementRecord, int]]:
    assert sorted(table) == list(table.names())
    assert len(table) == len(table.records()) == len(list(table.values()))
    return [(name, table.get(name), table.revision(name)) for name in table]


async def put(table: Table[EntitlementRecord], name: str, value: EntitlementRecord | None) -> None:
    async with table.lock(name):
        await table.commit(name, value)


async def test_a_reloaded_table_has_the_records_that_were_written(store: Store) -> None:
    async with store:
        mine = owner(store)
        follower = Follower(mine)
        await mine.load()
        for name in ("b", "a", "c"):
            await put(mine, name, record(name))
        again = owner(store)
        loaded = Follower(again)
        await again.load()
        assert view(again) == view(mine)
        assert loaded.known == follower.known == {name: record(name) for name in "abc"}
        for table in (mine, again):
            assert list(table.after("a")) == ["b", "c"]
            assert "b" in table
            assert table.find("x") is None
            assert table.expect(["a", "x"]) == {"entitlements/a": 2, "entitlements/x": 0}
            with pytest.raises(NotFound, match="there is no entitlement 'x'"):
                table.get("x")
        at = mine.latest
        await put(mine, "b", None)
        await put(mine, "d", record("d", 7))
        assert [(name, value) for name, value, _ in mine.changes(at)] == [
            ("b", None),
            ("d", record("d", 7)),
        ]
        assert follower.known == {name: mine.get(name) for name in mine}


@pytest.mark.parametrize("seed", range(8))
async def test_pages_and_histories_that_are_cut_hide_nothing(
    store: Store, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of two records and a store that drops its history: the next owner reads the same."""
    monkeypatch.setattr(bulk, "PAGE", 2)
    chance = random.Random(seed)
    async with store:
        mine = owner(store)
        follower = Follower(mine)
        await mine.load()
        for _ in range(120):
            name = chance.choice("abcdefgh")
            value = record(name, chance.randrange(1, 9)) if chance.random() < 0.7 else None
            if mine.find(name) != value:
                await put(mine, name, value)
            if chance.random() < 0.1:
                await store.compact((await store.list_prefix("", limit=1)).revision)
        again = owner(store)
        await again.load()
        assert view(again) == view(mine)
        assert follower.known == {name: mine.get(name) for name in mine}


@pytest.mark.behaviour("BUG-CP14")
async def test_an_abandoned_write_is_found_before_the_next(store: Store) -> None:
    """A cancelled write was pending in the writer.

    The lookup did not find it, and it arrived later.
    """
    async with store:
        table = owner(store)
        await table.load()
        await put(table, "a", record("a"))
        writing = asyncio.ensure_future(put(table, "a", record("a", 2)))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        async with table.lock("a"):
            known = table.get("a")
            entry = await store.get("entitlements/a")
            assert entry is not None
            assert (entry.revision, table.revision("a")) == (entry.revision,) * 2
            await table.commit("a", record("a", known.spec.machines + 5))
        assert table.get("a").spec.machines in (6, 7)


@pytest.mark.behaviour("F-47", "BUG-CP14")
@pytest.mark.parametrize(
    "outcome", [UNANSWERED, Outcome(late=1), Outcome(late=3), Outcome(made=False, answered=False)]
)
async def test_an_unknown_outcome_is_found_out_before_anything_else(outcome: Outcome) -> None:
    """The caller gets the true outcome, or the answer that the outcome is unknown."""
    async with FaultyStore(MemoryStore()) as store:
        table = owner(store)
        await table.load()
        for number, name in enumerate(("a", "a", "b"), 1):
            outcomes = iter((outcome,))
            store.outcome = lambda _, outcomes=outcomes: next(outcomes, MADE)
            try:
                await put(table, name, record(name, number))
                made = True
            except Busy:  # the hint of this error states that nothing was changed
                made = False
            for _ in range(5):
                await store.get("")
            entry = await store.inner.get(PREFIX + name)
            shown = table.find(name)
            assert (entry.revision if entry else 0) == table.revision(name)
            assert (shown == record(name, number)) is made


@pytest.mark.behaviour("F-47")
async def test_a_record_of_unknown_state_is_not_written_and_others_are() -> None:
    """Reads continue with the known state; the next writer queries the store first."""
    async with FaultyStore(MemoryStore()) as store:
        table = owner(store)
        await table.load()
        await put(table, "a", record("a"))

        def vanishes(_: object) -> Outcome:
            store.broken = "the disk is away"
            return UNANSWERED

        store.outcome = vanishes
        with pytest.raises(UnknownOutcome, match="whether entitlement a was written"):
            await put(table, "a", record("a", 2))
        assert table.get("a") == record("a")
        store.outcome = lambda _: MADE
        with pytest.raises(Exception, match="the disk is away"):
            await put(table, "a", record("a", 3))
        store.broken = ""
        await put(table, "b", record("b"))
        async with table.lock("a"):
            assert table.get("a") == record("a", 2)
        await store.txn({}, [Put("other", b"")])
